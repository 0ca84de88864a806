// Package members finds, stops and outlasts the processes of one step of the
// exec handler.
//
// Words:
//
//   - The leader is the shell that runs the command. It leads a process group,
//     and is a child of this process.
//   - The members are the processes of its group and, on Linux, those of the
//     step's cgroup, whoever carries the step's RV_STEP in the environment it was
//     started with, and the descendants of all of them.
//
// On Linux the members are found in three ways at once. A cgroup (v2) is made
// for each step below the one that this process is in, where that may be
// written: a child of a process is in it whatever it does, it is killed as a
// whole, and it can be removed exactly when nothing of it lives. Everywhere
// else, and besides, /proc is read: with the process as a child subreaper,
// setsid and a double fork hide nobody who keeps the environment. On macOS a
// step is its process group.
//
// Not promised, where there is no cgroup: to find a process that left the
// group and also changed or overwrote the environment it was started with
// (env -i, setproctitle) after its parent had ended; to catch a chain of
// processes out of the group, each of which starts the next and ends, since
// /proc is not read at one instant; or to end one that may not be signalled
// (set-user-ID). With a cgroup only a process that root moved out
// of it gets away like that. A limit that is set on the cgroup of this process
// holds for its steps too; but a program that reads its limits from its own
// cgroup, and not from those above, sees none.
package members

// Variable marks the processes of a step in their environment.
const Variable = "RV_STEP"
