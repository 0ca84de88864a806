package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"reveille/bus"
)

// fixMissing makes streams and durables: what starts looks for them.
const fixMissing = "a worker or a scanner that starts makes it, and so does reveille relay --rebuild, where the user may (deploy/nats: the operator)"

func (d *doctor) streams(ctx context.Context) []Finding {
	if d.conn == nil {
		return nil
	}
	in, err := d.conn.Inspect(ctx, d.Streams)
	if err != nil {
		return []Finding{bad(Fail, checkStreams, fixNoAnswer, "%s", oneLine(err))}
	}
	d.inspection = in
	var out []Finding
	var fine, denied []string
	for _, s := range in.Streams {
		name := s.Want.Name
		switch {
		case errors.Is(s.Err, bus.ErrDenied):
			denied = append(denied, name)
			continue
		case s.Missing():
			out = append(out, bad(Fail, checkStreams, fixMissing, "%s is missing", name))
			continue
		case s.Err != nil:
			out = append(out, bad(Fail, checkStreams, fixNoAnswer, "%s: %s", name, oneLine(s.Err)))
			continue
		}
		d.there = append(d.there, s)
		findings := judgeStream(s)
		if len(findings) == 0 {
			fine = append(fine, name)
		}
		out = append(out, findings...)
	}
	if len(denied) > 0 {
		out = append(out, d.notAsked("streams", strings.Join(denied, ", ")))
	}
	if len(fine) > 0 {
		out = slices.Insert(out, 0, ok(checkStreams, "%s as Reveille makes them", strings.Join(fine, ", ")))
	}
	return out
}

// notAsked is about what this user may not look at, as most who only publish or
// observe may not.
func (d *doctor) notAsked(check, what string) Finding {
	if d.Role == bus.RolePublisher || d.Role == bus.RoleObserver {
		return ok(check, "%s: not asked, which %s need not be able to", what, aRole(d.Role))
	}
	return bad(Warn, check, "ask as the operator (deploy/nats)", "%s: this user may not ask about them", what)
}

// judgeStream tells what is not as it should be. Replicas are told by themselves.
func judgeStream(s bus.StreamFound) []Finding {
	var out []Finding
	for _, diff := range s.Differences {
		if diff.Setting == "replicas" {
			continue
		}
		status, fix := streamFix(s.Want, diff.Setting)
		out = append(out, bad(status, checkStreams, fix, "%s: %s", s.Want.Name, diff.Text))
	}
	return out
}

// streamFix says how bad it is that a stream has another setting, and how it is
// changed. What the server does not let be changed, makes a new stream.
func streamFix(want jetstream.StreamConfig, setting string) (Status, string) {
	queue := want.Retention == jetstream.WorkQueuePolicy
	loses := Warn // where a limit takes work away, it is lost; elsewhere a copy
	if queue {
		loses = Fail
	}
	flag := func(status Status, format string, args ...any) (Status, string) {
		return status, "nats stream edit " + want.Name + " " + fmt.Sprintf(format, args...)
	}
	switch setting {
	case "subjects":
		var all []string
		for _, s := range want.Subjects {
			all = append(all, "--subjects='"+s+"'")
		}
		return flag(Fail, "%s", strings.Join(all, " "))
	case "max_age":
		return flag(loses, "--max-age=%v", want.MaxAge)
	case "limits":
		return flag(loses, "--max-bytes=-1 --max-msgs=-1")
	case "max_msgs_per_subject":
		if want.MaxMsgsPerSubject <= 0 {
			return flag(loses, "--max-msgs-per-subject=-1")
		}
		return flag(Warn, "--max-msgs-per-subject=%d", want.MaxMsgsPerSubject)
	case "discard":
		return flag(Warn, "--discard=%s", strings.ToLower(strings.TrimPrefix(want.Discard.String(), "Discard")))
	case "discard_new_per_subject":
		return flag(Warn, "%s", yes(want.DiscardNewPerSubject, "discard-per-subject"))
	case "duplicate_window":
		return flag(Warn, "--dupe-window=%v", want.Duplicates)
	case "allow_direct":
		return flag(Warn, "%s", yes(want.AllowDirect, "allow-direct"))
	case "allow_atomic":
		return flag(Warn, "%s", yes(want.AllowAtomicPublish, "allow-batch"))
	case "allow_rollup_hdrs": // anybody who publishes there can wipe it
		return flag(Fail, "--no-allow-rollup")
	case "no_ack":
		return flag(Fail, "--ack")
	case "deny_purge", "deny_delete":
		if want.DenyPurge && setting == "deny_purge" || want.DenyDelete && setting == "deny_delete" {
			return flag(Warn, "--%s", strings.ReplaceAll(setting, "_", "-"))
		}
		return Warn, anew(want)
	default: // retention, storage, sealed, allow_msg_schedules
		return Fail, anew(want)
	}
}

func yes(on bool, flag string) string {
	if on {
		return "--" + flag
	}
	return "--no-" + flag
}

// anew replaces a stream, without losing what only it has.
func anew(want jetstream.StreamConfig) string {
	remove := "nats stream rm " + want.Name
	switch {
	case strings.HasSuffix(want.Name, "_EVENTS"):
		return remove + ", then reveille relay --rebuild, which publishes all events again"
	case strings.HasSuffix(want.Name, "_COMMANDS"):
		return "stop publishing, wait until it is empty, " + remove + ", then reveille relay --rebuild, which makes it"
	case strings.HasSuffix(want.Name, "_READY"):
		return remove + ", then reveille relay --rebuild, which makes it; scanners announce again"
	default:
		return "keep a copy of what is in it if that is needed, " + remove + ", then reveille relay --rebuild, which makes it"
	}
}

func (d *doctor) durables(context.Context) []Finding {
	if d.inspection == nil || len(d.inspection.Durables) == 0 {
		return nil
	}
	slots, known := int64(0), d.store != nil && d.tables
	for _, p := range d.live {
		if p.kind == "worker" {
			slots += p.slots
		}
	}
	var out []Finding
	var fine, denied []string
	for _, f := range d.inspection.Durables {
		name := f.Stream + " " + f.Want.Durable
		switch {
		case errors.Is(f.Err, bus.ErrDenied):
			denied = append(denied, name)
			continue
		case errors.Is(f.Err, jetstream.ErrConsumerNotFound):
			out = append(out, bad(Fail, checkDurables, fixMissing, "%s is missing: what comes there is not taken", name))
			continue
		case f.Err != nil:
			out = append(out, bad(Fail, checkDurables, fixNoAnswer, "%s: %s", name, oneLine(f.Err)))
			continue
		}
		findings := judgeDurable(f, slots, known)
		if len(findings) == 0 {
			fine = append(fine, name)
		}
		out = append(out, findings...)
	}
	if len(denied) > 0 {
		out = append(out, d.notAsked(checkDurables, strings.Join(denied, ", ")))
	}
	if len(fine) > 0 {
		out = slices.Insert(out, 0, ok(checkDurables, "%s as Reveille makes them", strings.Join(fine, ", ")))
	}
	return out
}

// pendingPerSlot: messages that wait for a delayed redelivery keep their place,
// and at the limit a durable delivers nothing (docs/jetstream.md).
const pendingPerSlot = 4

func judgeDurable(f bus.DurableFound, slots int64, known bool) []Finding {
	var out []Finding
	edit := "nats consumer edit " + f.Stream + " " + f.Want.Durable + " "
	for _, diff := range f.Differences {
		status, fix := durableFix(f, edit, diff.Setting)
		out = append(out, bad(status, checkDurables, fix, "%s %s: %s", f.Stream, f.Want.Durable, diff.Text))
	}
	most, need := int64(f.Info.Config.MaxAckPending), pendingPerSlot*slots
	if known && most > 0 && most < need {
		out = append(out, bad(Warn, checkDurables, fmt.Sprintf("%s--max-pending=%d", edit, need),
			"%s %s: max_ack_pending is %d, less than %d for each of the %d slots of live workers: it stalls under load", f.Stream, f.Want.Durable, most, pendingPerSlot, slots))
	}
	return out
}

func durableFix(f bus.DurableFound, edit, setting string) (Status, string) {
	switch setting {
	case "filter":
		var all []string
		for _, s := range f.Want.FilterSubjects {
			all = append(all, "--filter='"+s+"'")
		}
		return Fail, edit + strings.Join(all, " ")
	case "ack_wait":
		return Warn, fmt.Sprintf("%s--wait=%v", edit, f.Want.AckWait)
	case "max_deliver": // past it, a message stays in the queue and is never delivered
		return Fail, edit + "--max-deliver=-1"
	case "backoff steps": // it overrides ack_wait
		return Warn, edit + "--backoff=none"
	}
	status := Warn
	if setting == "ack_policy" {
		status = Fail
	}
	return status, "nats consumer rm " + f.Stream + " " + f.Want.Durable + ": a running worker makes it again; what was delivered comes again"
}

// clusterSize is from how many servers on a stream can have three replicas.
const clusterSize = 3

// syncInterval is what one replica means.
const syncInterval = "by default a server syncs its files every two minutes (sync_interval), so a loss of power, not of the process, can lose " +
	"messages that it acknowledged, silently: events are published again from the database (scanners do, reveille relay --rebuild does), " +
	"commands are lost unless their publisher sends them again with the same message id; three replicas, or sync_interval: always, prevent it"

// replicas tells how many copies of each stream there are, and what that means.
func (d *doctor) replicas(context.Context) []Finding {
	if d.conn == nil || len(d.there) == 0 {
		return nil
	}
	return judgeReplicas(d.there, len(servers(d.conn.NATS())))
}

func judgeReplicas(streams []bus.StreamFound, known int) []Finding {
	var out []Finding
	var single []string
	for _, s := range streams {
		name, has, want := s.Want.Name, s.Info.Config.Replicas, s.Want.Replicas
		why := fmt.Sprintf("want %d", want)
		if known >= clusterSize && want < clusterSize {
			want, why = clusterSize, fmt.Sprintf("though there are %d servers", known)
		}
		if has < want {
			out = append(out, bad(Warn, checkReplicas, fmt.Sprintf("nats stream edit %s --replicas=%d", name, want),
				"%s has %s, %s", name, counted(has, "replica"), why))
		}
		if has == 1 {
			single = append(single, name)
		}
		if c := s.Info.Cluster; c != nil && has > 1 {
			for _, r := range c.Replicas {
				if r.Offline {
					out = append(out, bad(Warn, checkReplicas, "start server "+r.Name+"; without a majority nothing is stored", "%s: its replica on %s is offline", name, r.Name))
				}
			}
		}
	}
	if len(single) > 0 {
		return append(out, ok(checkDurability, "one replica of %s: %s", strings.Join(single, ", "), syncInterval))
	}
	return append(out, ok(checkDurability, "every stream has more than one replica: what is acknowledged survives the loss of one server"))
}
