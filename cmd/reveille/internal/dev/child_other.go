//go:build unix && !linux

package dev

import "syscall"

// childAttr: there is no parent-death signal here; EndWithParent does it.
func childAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
