package dev

import "syscall"

// childAttr: the kernel kills the child when dev ends, however that happens.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
