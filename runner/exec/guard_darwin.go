package exec

import (
	"os"
	"syscall"
)

func dieWithThread(*syscall.SysProcAttr) {} // there is no such signal

func selfExecutable() (string, error) { return os.Executable() }
