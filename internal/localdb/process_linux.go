package localdb

import (
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// serverAttr: the server gets a fast shutdown when its parent dies, however that happens.
func serverAttr(cred *syscall.Credential) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGINT, Credential: cred}
}

// commandLines yields all processes that can be seen. A zombie's is empty.
func commandLines() iter.Seq2[int, string] {
	return func(yield func(int, string) bool) {
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return
		}
		for _, e := range entries {
			pid, err := strconv.Atoi(e.Name())
			if err != nil {
				continue
			}
			line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
			if err != nil { // ended meanwhile
				continue
			}
			if !yield(pid, string(line)) {
				return
			}
		}
	}
}
