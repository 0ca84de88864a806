package doctor

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"

	"reveille/bus"
)

// Check names of the part of NATS.
const (
	checkNATS        = "nats"
	checkTLS         = "tls"
	checkJetStream   = "jetstream"
	checkStreams     = "streams"
	checkDurables    = "durables"
	checkReplicas    = "replicas"
	checkDurability  = "durability"
	checkPermissions = "permissions"
)

// fixNoAnswer is for a question that nobody answered and nobody denied.
const fixNoAnswer = "see the servers' logs: a stream without a majority of its servers has no leader, and answers nothing"

func (d *doctor) nats(ctx context.Context) []Finding {
	conn, err := bus.Connect(ctx, d.NATS)
	if err != nil {
		return []Finding{bad(Fail, checkNATS,
			"start it (or reveille dev), or name another with --nats-url; where it asks for a user, TLS or an authority: --nats-creds, tls://, --nats-ca",
			"%s; not checked without it: streams, durables, permissions", oneLine(err))}
	}
	d.conn = conn
	nc := conn.NATS()
	f := ok(checkNATS, "%s %s at %s, of %s", nc.ConnectedServerName(), nc.ConnectedServerVersion(), nc.ConnectedAddr(), counted(len(servers(nc)), "known server"))
	switch err := conn.CheckServer(); {
	case errors.Is(err, bus.ErrServerTooOld):
		f = bad(Fail, checkNATS, "upgrade nats-server to 2.12 or newer", "%s at %s is %s, which is too old", nc.ConnectedServerName(), nc.ConnectedAddr(), nc.ConnectedServerVersion())
	case err != nil:
		f = bad(Fail, checkNATS, fixNoAnswer, "%s", oneLine(err))
	}
	return []Finding{f, d.encrypted(nc)}
}

// servers are the addresses that the client knows of.
func servers(nc *nats.Conn) map[string]bool {
	out := map[string]bool{}
	for _, s := range nc.Servers() {
		if u, err := url.Parse(s); err == nil {
			out[u.Host] = true
		}
	}
	return out
}

func (d *doctor) encrypted(nc *nats.Conn) Finding {
	if state, err := nc.TLSConnectionState(); err == nil {
		return ok(checkTLS, "%s", tls.VersionName(state.Version))
	}
	return unencrypted(nc.ConnectedAddr())
}

func unencrypted(addr string) Finding {
	host, _, err := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); err != nil || ip != nil && ip.IsLoopback() { // no port: a server in this process
		return ok(checkTLS, "not encrypted, and on this machine")
	}
	return bad(Warn, checkTLS, "give the server a certificate, and --nats-url tls://… (deploy/nats shows both)",
		"the connection to %s is not encrypted: what is on the way sees passwords, inputs and texts", addr)
}

func (d *doctor) jetStream(ctx context.Context) []Finding {
	if d.conn == nil {
		return nil
	}
	const without = "not checked without it: streams, durables, permissions"
	err := d.conn.CheckJetStream(ctx)
	f := ok(checkJetStream, "enabled")
	switch {
	case err == nil:
	case errors.Is(err, bus.ErrNoInbox):
		f = bad(Fail, checkJetStream, "let the user subscribe to _INBOX.<its name>.>, as deploy/nats does", "%s: this user hears no answers; %s", oneLine(err), without)
	case errors.Is(err, bus.ErrDenied):
		return []Finding{ok(checkJetStream, "this user may not ask; the streams tell")}
	case errors.Is(err, bus.ErrNobody):
		f = bad(Fail, checkJetStream, "enable it: jetstream {} in the server's configuration, or nats-server -js", "not enabled on server %s; %s", d.conn.NATS().ConnectedServerName(), without)
	case errors.Is(err, bus.ErrNoAnswer):
		f = bad(Fail, checkJetStream, fixNoAnswer, "no answer in %v; %s", d.Timeout, without)
	default:
		f = bad(Fail, checkJetStream, "enable it for this user's account: jetstream: enabled", "%s; %s", oneLine(err), without)
	}
	if f.Status == Fail {
		d.conn.Close()
		d.conn = nil
	}
	return []Finding{f}
}

// shownLacks bounds what a line lists for a role that was not asked for.
const shownLacks = 4

func (d *doctor) permissions(ctx context.Context) []Finding {
	if d.conn == nil || d.inspection == nil {
		return nil
	}
	roles := bus.Roles()
	if d.Role != "" {
		roles = []bus.Role{d.Role}
	}
	lacks, err := d.conn.Permissions(ctx, roles, d.inspection)
	if err != nil {
		return []Finding{bad(Fail, checkPermissions, fixNoAnswer, "%s", oneLine(err))}
	}
	return judgePermissions(roles, lacks, d.Role != "")
}

// judgePermissions tells who the user can be, and what it lacks to be another.
func judgePermissions(roles []bus.Role, lacks []bus.Lack, named bool) []Finding {
	var out []Finding
	var can []string
	for _, role := range roles {
		var own []bus.Lack
		for _, l := range lacks {
			if slices.Contains(l.Roles, role) {
				own = append(own, l)
			}
		}
		if len(own) == 0 {
			can = append(can, string(role))
		} else {
			out = append(out, lacking(role, own, named))
		}
	}
	if len(can) > 0 {
		out = slices.Insert(out, 0, ok(checkPermissions, "this user can do what these do: %s (taking messages is not tried)", strings.Join(can, ", ")))
	}
	return out
}

func lacking(role bus.Role, lacks []bus.Lack, named bool) Finding {
	var each []string
	denied := true
	for i, l := range lacks {
		denied = denied && errors.Is(l.Err, bus.ErrDenied)
		if i < shownLacks || named {
			each = append(each, fmt.Sprintf("%s (%s)", l.Need, oneLine(l.Err)))
		}
	}
	if left := len(lacks) - len(each); left > 0 {
		each = append(each, fmt.Sprintf("and %d more (--role %s lists them)", left, role))
	}
	status, fix := Warn, fmt.Sprintf("where this user is to be %s, let it do that, as deploy/nats does; else nothing", aRole(role))
	if named {
		status, fix = Fail, "let it do that, as deploy/nats does"
	}
	if !denied {
		fix += "; where it was not denied, see the servers' logs"
	}
	return bad(status, checkPermissions, fix, "this user can't do what %s does: %s", aRole(role), strings.Join(each, ", "))
}

func aRole(r bus.Role) string {
	if strings.ContainsAny(string(r[:1]), "aeiou") {
		return "an " + string(r)
	}
	return "a " + string(r)
}
