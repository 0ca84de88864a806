package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"reveille/bus"
	"reveille/claims/crdb"
)

// Check names of the database's part.
const (
	checkDatabase   = "database"
	checkSchema     = "schema"
	checkClock      = "clock"
	checkWorkers    = "workers"
	checkScanners   = "scanners"
	checkVersions   = "versions"
	checkQuarantine = "quarantine"
	checkOverdue    = "overdue"
)

// fixDatabaseErrors is for a database that answers one question and not the next.
const fixDatabaseErrors = "see the database's log; reveille doctor --timeout 30s waits longer"

// database opens the store, whose connections check their isolation.
func (d *doctor) database(ctx context.Context) []Finding {
	if d.DatabaseURL == "" {
		if d.Role == bus.RolePublisher || d.Role == bus.RoleObserver {
			return []Finding{ok(checkDatabase, "none is named, and %s needs none", aRole(d.Role))}
		}
		return []Finding{bad(Fail, checkDatabase, "start reveille dev in this folder, or give --database-url or RV_DATABASE_URL",
			"none is named; not checked without it: schema, clock, processes, backlog")}
	}
	store, err := crdb.Open(ctx, d.DatabaseURL, crdb.Options{Timeout: d.Timeout, MaxConns: 2, AppName: "reveille doctor"})
	if err != nil {
		return []Finding{noDatabase(d.DatabaseURL, err)}
	}
	d.store = store
	version, err := store.Version(ctx)
	if err != nil {
		return []Finding{bad(Fail, checkDatabase, fixDatabaseErrors, "%s", oneLine(err))}
	}
	return []Finding{engine(version)}
}

func noDatabase(databaseURL string, err error) Finding {
	if !crdb.Unavailable(err) {
		return bad(Fail, checkDatabase, "correct what it names: the URL, the user, or a pooler or proxy on the way that changes a connection's settings",
			"%s; not checked without it: schema, clock, processes, backlog", oneLine(err))
	}
	at := "the database"
	if u, parseErr := url.Parse(databaseURL); parseErr == nil && u.Host != "" {
		at = u.Host
	}
	var network *net.OpError
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		err = context.DeadlineExceeded
	case errors.As(err, &network): // pgx tells it once for each address
		err = network
	}
	return bad(Fail, checkDatabase, "start it, or name another with --database-url or RV_DATABASE_URL",
		"%s does not answer (%s); not checked without it: schema, clock, processes, backlog", at, oneLine(err))
}

// The oldest engines (docs/database.md).
var oldest = map[string][2]int{"CockroachDB": {23, 1}, "PostgreSQL": {15, 0}}

// engine judges what version() says: "PostgreSQL 15.18 (Debian …) on …", "CockroachDB CCL v23.1.11 (…) …".
func engine(version string) Finding {
	words := strings.Fields(version)
	name, number := "", ""
	for i, w := range words {
		if i == 0 {
			name = w
		} else if digits := strings.TrimPrefix(w, "v"); digits != "" && digits[0] >= '0' && digits[0] <= '9' {
			number = digits
			break
		}
	}
	want, known := oldest[name]
	major, rest, _ := strings.Cut(number, ".")
	minor, _, _ := strings.Cut(rest, ".")
	x, err := strconv.Atoi(major)
	if !known || err != nil {
		return bad(Warn, checkDatabase, "use CockroachDB 23.1 or PostgreSQL 15, or newer: Reveille is tested with no other",
			"it says it is %q", strings.Join(words[:min(len(words), 3)], " "))
	}
	y, _ := strconv.Atoi(minor) // a beta has none
	if x < want[0] || x == want[0] && y < want[1] {
		return bad(Fail, checkDatabase, fmt.Sprintf("upgrade it to %s %d.%d or newer", name, want[0], want[1]), "%s %s is too old", name, number)
	}
	return ok(checkDatabase, "%s %s, transactions are serializable", name, number)
}

func (d *doctor) schema(ctx context.Context) []Finding {
	if d.store == nil {
		return nil
	}
	there, needed, err := d.store.Schema(ctx)
	d.tables = err == nil && there > 0
	switch {
	case err != nil:
		return []Finding{bad(Fail, checkSchema, fixDatabaseErrors, "%s; not checked without it: processes, backlog", oneLine(err))}
	case there == 0:
		return []Finding{bad(Fail, checkSchema, "reveille migrate", "there is none; not checked without it: processes, backlog")}
	case there < needed:
		return []Finding{bad(Fail, checkSchema, "reveille migrate", "it is version %d, this program needs %d", there, needed)}
	case there > needed:
		return []Finding{bad(Warn, checkSchema, "use the programs of the version that made it, here and where workers and scanners run",
			"it is version %d, newer than this program, which knows %d", there, needed)}
	}
	return []Finding{ok(checkSchema, "version %d", there)}
}

// process is a worker or a scanner whose lease is live.
type process struct {
	kind, version string
	slots, claims int64
}

// leasePage is how many leases one read takes.
const leasePage = 500

// processes looks at the live leases.
func (d *doctor) processes(ctx context.Context) []Finding {
	if d.store == nil || !d.tables {
		return nil
	}
	after, more := crdb.LeaseDetail{}, true
	for more {
		page, err := d.store.Leases(ctx, after.Holder, leasePage)
		if err != nil {
			return []Finding{bad(Fail, checkWorkers, fixDatabaseErrors, "%s", oneLine(err))}
		}
		for _, l := range page {
			if l.Live {
				d.live = append(d.live, process{l.Kind, l.Version, l.Slots, l.Claims})
			}
		}
		if more = len(page) == leasePage; more {
			after = page[len(page)-1]
		}
	}
	return judgeProcesses(d.live)
}

func judgeProcesses(live []process) []Finding {
	number, slots, sessions := map[string]int{}, int64(0), int64(0)
	versions := map[string]map[string]int{}
	for _, p := range live {
		number[p.kind]++
		if p.kind == "worker" {
			slots, sessions = slots+p.slots, sessions+p.claims
		}
		if versions[p.version] == nil {
			versions[p.version] = map[string]int{}
		}
		versions[p.version][p.kind]++
	}
	var out []Finding
	if number["worker"] > 0 {
		out = append(out, ok(checkWorkers, "%s with %s, %d of them in use", counted(number["worker"], "worker"), counted(int(slots), "slot"), sessions))
	} else {
		out = append(out, bad(Fail, checkWorkers, "start one: worker --exec CMD", "no worker has a live lease: commands wait"))
	}
	if number["scanner"] > 0 {
		out = append(out, ok(checkScanners, "%s", counted(number["scanner"], "scanner")))
	} else {
		out = append(out, bad(Fail, checkScanners, "start one: scanner", "no scanner has a live lease: what crashed workers leave is not repaired"))
	}
	if len(versions) > 1 {
		var each []string
		for _, v := range slices.Sorted(maps.Keys(versions)) {
			of := versions[v]
			for _, kind := range slices.Sorted(maps.Keys(of)) {
				each = append(each, counted(of[kind], kind)+" of "+v)
			}
		}
		out = append(out, bad(Warn, checkVersions, "restart the older ones with the newer program", "not all that live are of one version: %s", strings.Join(each, ", ")))
	}
	return out
}

func (d *doctor) quarantines(ctx context.Context) []Finding {
	if d.store == nil || !d.tables {
		return nil
	}
	counts, err := d.store.Quarantined(ctx)
	if err != nil {
		return []Finding{bad(Fail, checkQuarantine, fixDatabaseErrors, "%s", oneLine(err))}
	}
	var each []string
	all := int64(0)
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		each = append(each, fmt.Sprintf("%d %s", counts[reason], reason))
		all += counts[reason]
	}
	if all == 0 {
		return []Finding{ok(checkQuarantine, "no session is quarantined")}
	}
	return []Finding{bad(Warn, checkQuarantine, "reveille quarantine list, then show and release",
		"%s quarantined: %s", counted(int(all), "session"), strings.Join(each, ", "))}
}

// What is much, many times what is usual. A scanner looks every second, and
// relays what its owner has not within 5 s: thirty passes. A ready session waits
// for a free slot, and how long is a matter of load: a minute is a queue.
const (
	muchForScanner = 30 * time.Second
	muchForWorker  = time.Minute
)

func (d *doctor) overdue(ctx context.Context) []Finding {
	if d.store == nil || !d.tables {
		return nil
	}
	o, err := d.store.Overdue(ctx)
	if err != nil {
		return []Finding{bad(Fail, checkOverdue, fixDatabaseErrors, "%s", oneLine(err))}
	}
	return judgeOverdue(o)
}

func judgeOverdue(o crdb.Overdue) []Finding {
	var out []Finding
	late := func(age, much time.Duration, fix, format string) {
		if age > much {
			out = append(out, bad(Warn, checkOverdue, fix, format, age.Round(time.Second)))
		}
	}
	late(o.Claims, muchForScanner, "start a scanner; one that runs says in its log why it can't take them over",
		"the claims of a worker that is gone wait for a scanner for %v")
	late(max(o.Sessions, o.Continuations), muchForWorker, "start more workers, or give them more --slots; reveille sessions --state ready lists them",
		"a session is ready for %v and no worker takes it")
	late(o.Events, muchForScanner, "start a scanner, which relays them; one that runs says in its log why the stream does not take them",
		"events wait for %v to be published on the stream")
	if len(out) == 0 {
		out = append(out, ok(checkOverdue, "no work waits for long"))
	}
	return out
}
