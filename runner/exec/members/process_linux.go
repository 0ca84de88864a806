package members

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	// maxEnvironment bounds what is read of an environment; the kernel allows three
	// quarters of 8 MiB for it and the arguments.
	maxEnvironment = 6 << 20

	kernelThread = 0x00200000 // PF_KTHREAD
)

// ID names one life of a process: numbers are used again, a number with a
// start time (clock ticks since boot) is not.
type ID struct {
	PID   int
	start uint64
}

// Process is what /proc/<pid>/stat says.
type Process struct {
	ID
	State   byte // a letter: R, S, D, Z, T, …
	Parent  int
	Group   int // its process group
	flags   uint64
	threads int
}

// Dead reports whether only the status is left. A process whose first thread
// has ended looks like a zombie while its other threads run.
func (p Process) Dead() bool {
	return (p.State == 'Z' || p.State == 'X' || p.State == 'x') && p.threads <= 1
}

// readMark is the step that a process was started for, or "", and whether it
// has no environment at all. One that may not be read is not ours.
func readMark(pid int) (step string, empty bool) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return "", false
	}
	defer f.Close()
	environment, err := io.ReadAll(io.LimitReader(f, maxEnvironment))
	if err != nil {
		return "", false
	}
	for entry := range bytes.SplitSeq(environment, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, []byte(Variable+"=")); ok {
			return string(value), false
		}
	}
	return "", len(environment) == 0
}

func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) }

// readAll reads all processes that can be seen, and reports whether one
// ended meanwhile.
func readAll() (processes []Process, vanished bool, err error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, false, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, false, err
	}
	processes = make([]Process, 0, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		p, err := Read(pid)
		switch {
		case err == nil:
			processes = append(processes, p)
		case isGone(err):
			vanished = true
		default:
			return nil, false, err
		}
	}
	return processes, vanished, nil
}

// Read reads /proc/<pid>/stat, see proc_pid_stat(5). It is called for
// every process at the end of every step, so without an os.File.
func Read(pid int) (Process, error) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Process{}, err
	}
	defer unix.Close(fd)
	var buffer [1024]byte
	n, err := unix.Read(fd, buffer[:])
	if err != nil {
		return Process{}, err
	}
	// The name is in parentheses and may hold any byte, these too.
	fields := bytes.Fields(buffer[bytes.LastIndexByte(buffer[:n], ')')+1 : n])
	if len(fields) < 20 {
		return Process{}, fmt.Errorf("/proc/%d/stat has %d fields: %w", pid, len(fields), unix.ESRCH)
	}
	number := func(i int) uint64 {
		v, _ := strconv.ParseUint(string(fields[i]), 10, 64)
		return v
	}
	return Process{
		ID:      ID{PID: pid, start: number(19)},
		State:   fields[0][0],
		Parent:  int(number(1)),
		Group:   int(number(2)),
		flags:   number(6),
		threads: int(number(17)),
	}, nil
}
