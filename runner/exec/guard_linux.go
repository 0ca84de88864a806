package exec

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// dieWithThread has the process killed when the thread that started it ends.
func dieWithThread(attr *syscall.SysProcAttr) { attr.Pdeathsig = unix.SIGKILL }

// selfExecutable is this program, also where its file was replaced since.
func selfExecutable() (string, error) { return "/proc/self/exe", nil }
