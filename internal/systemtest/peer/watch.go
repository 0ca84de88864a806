package main

import (
	"bufio"
	"io"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
)

// watch reads the process groups that a test has begun (+) and ended (-), and
// kills those that are left when the test is gone.
func watch(in io.Reader) {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	groups := map[int]bool{}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		line := lines.Text()
		pid, err := strconv.Atoi(strings.TrimLeft(line, "+-"))
		if err != nil || pid <= 1 {
			continue
		}
		if strings.HasPrefix(line, "+") {
			groups[pid] = true
		} else {
			delete(groups, pid)
		}
	}
	for pid := range groups {
		_ = syscall.Kill(-pid, syscall.SIGKILL) // it may be gone
	}
}
