#!/bin/sh
# Counts the lines of the file that the input names.
#
#   reveille dev --exec 'sh examples/lines.sh'
#   reveille wake files --input '"README.md"' --wait
#
# Paths are relative to the folder that reveille dev was started in.
file=$(sed -n 's/.*"index":[0-9]*,"inputs":\[{[^}]*"body":"\([^"\\]*\)".*/\1/p')
if [ -z "$file" ]; then
  echo 'the input must be the name of a file, as in "README.md"' >&2
  exit 1
fi
wc -l "$file"
