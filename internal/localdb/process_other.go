//go:build unix && !linux

package localdb

import (
	"iter"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// serverAttr: there is no parent-death signal here; what a killed parent leaves, the next Start stops.
func serverAttr(cred *syscall.Credential) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Credential: cred}
}

// commandLines yields all processes that can be seen.
func commandLines() iter.Seq2[int, string] {
	return func(yield func(int, string) bool) {
		out, err := exec.Command("ps", "-A", "-ww", "-o", "pid=,command=").Output()
		if err != nil {
			return
		}
		for line := range strings.Lines(string(out)) {
			number, command, _ := strings.Cut(strings.TrimSpace(line), " ")
			pid, err := strconv.Atoi(number)
			if err != nil {
				continue
			}
			if !yield(pid, strings.TrimSpace(command)) {
				return
			}
		}
	}
}
