package follow

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"reveille/claims"
)

const (
	// mostShown is where JSON and messages are cut on a line.
	mostShown = 200
	// mostTexts bounds the steps whose text is put together at once.
	mostTexts = 1000
	// shortID is how much of a UUID tells it from the others nearby.
	shortID = 8
)

// Printer shows events as lines and the text of steps between them: live text
// as it comes, and the durable text only where no live text was.
type Printer struct {
	w     io.Writer
	zone  *time.Location
	err   error
	day   string
	texts map[claims.StepID]*Text // of the steps whose start was seen, and seen live
	// text is whose text the last line shows, where that line is not at its end.
	text struct {
		open    bool
		session claims.SessionID
		step    claims.StepID
	}
}

// NewPrinter writes to w, with times in zone.
func NewPrinter(w io.Writer, zone *time.Location) *Printer {
	return &Printer{w: w, zone: zone, texts: map[claims.StepID]*Text{}}
}

// Event shows an event. live says that live text of a step that starts with it
// can't have been missed.
func (p *Printer) Event(r claims.Record, live bool) error {
	switch r.Type {
	case claims.StepStartedEvent:
		if live && len(p.texts) < mostTexts {
			p.texts[r.Step] = &Text{}
		}
	case claims.StepEndedEvent, claims.StepFailedEvent, claims.StepInterruptedEvent:
		delete(p.texts, r.Step)
	case claims.TextEvent:
		s := data[claims.TextData](r).Text
		if t := p.texts[r.Step]; t != nil {
			s = t.Durable(s)
		}
		p.write(r.Session, r.Step, s)
		return p.err
	}
	p.endText()
	at, err := time.Parse(time.RFC3339, r.Time)
	if err != nil {
		at = time.Time{}
	}
	at = at.In(p.zone)
	if day := at.Format(time.DateOnly); day != p.day {
		p.day = day
		p.print("-- " + day + "\n")
	}
	p.print(strings.TrimRight(fmt.Sprintf("%s  %s  %4d  %-22s %s", at.Format("15:04:05.000"), r.Session, r.Seq, r.Type, Describe(r)), " ") + "\n")
	return p.err
}

// Live shows a piece of live text, of a step whose start was shown.
func (p *Printer) Live(session claims.SessionID, step claims.StepID, s string) error {
	if t := p.texts[step]; t != nil {
		p.write(session, step, t.Live(s))
	}
	return p.err
}

// write shows text, each line of it behind a bar.
func (p *Printer) write(session claims.SessionID, step claims.StepID, s string) {
	if s == "" {
		return
	}
	if p.text.open && p.text.step != step {
		p.endText()
	}
	for line := range strings.Lines(s) {
		if !p.text.open {
			p.print(fmt.Sprintf("%12s  %s  %4s  | ", "", session, ""))
		}
		p.text.open = !strings.HasSuffix(line, "\n")
		p.print(printable(strings.TrimSuffix(line, "\n")))
		if !p.text.open {
			p.print("\n")
		}
	}
	p.text.session, p.text.step = session, step
}

func (p *Printer) endText() {
	if p.text.open {
		p.text.open = false
		p.print("\n")
	}
}

func (p *Printer) print(s string) {
	if p.err == nil {
		_, p.err = io.WriteString(p.w, s)
	}
}

// Describe says in a few words what an event's data say.
func Describe(r claims.Record) string {
	switch r.Type {
	case claims.InputAdmitted:
		d := data[claims.InputAdmittedData](r)
		if d.Armed {
			return fmt.Sprintf("%s (%s)", printable(d.Input), d.Delivery)
		}
		return fmt.Sprintf("%s (%s, waits for a wake)", printable(d.Input), d.Delivery)
	case claims.InputPromoted:
		return printable(data[claims.InputData](r).Input)
	case claims.InputCancelled:
		d := data[claims.InputCancelledData](r)
		return printable(d.Input) + because(d.Reason)
	case claims.WakeCancelled, claims.ExecutionCancelling:
		return printable(data[claims.ReasonData](r).Reason)
	case claims.ContinuationCancelled:
		d := data[claims.ContinuationCancelledData](r)
		return fmt.Sprintf("%s of step %s%s", d.Kind, ID(d.Step), because(d.Reason))
	case claims.ExecutionStarted:
		d := data[claims.ExecutionStartedData](r)
		return fmt.Sprintf("%s on %s, epoch %d", ID(r.Execution), printable(d.Worker), r.Epoch)
	case claims.ExecutionEnded:
		return string(data[claims.ExecutionEndedData](r).Outcome)
	case claims.StepStartedEvent:
		return describeStart(r)
	case claims.StepEndedEvent:
		d := data[claims.StepEndedData](r)
		if d.Continue {
			return "continues" + result(d.Result)
		}
		return strings.TrimPrefix(result(d.Result), ", ")
	case claims.StepFailedEvent:
		d := data[claims.Failure](r)
		if d.Retryable {
			return Short(describe(d)) + ", retryable"
		}
		return Short(describe(d))
	case claims.StepInterruptedEvent:
		d := data[claims.StepInterruptedData](r)
		if !d.Joined {
			return strings.TrimLeft(printable(d.Reason)+" (not joined)", " ")
		}
		return printable(d.Reason)
	case claims.TextEvent:
		return Short(fmt.Sprintf("%q", data[claims.TextData](r).Text))
	case claims.ToolCalled:
		d := data[claims.ToolCalledData](r)
		return printable(d.Call) + ": " + printable(d.Name) + " " + Short(string(d.Input))
	case claims.ToolSucceeded:
		d := data[claims.ToolSucceededData](r)
		return printable(d.Call) + ": " + Short(string(d.Output))
	case claims.ToolFailed:
		d := data[claims.ToolFailedData](r)
		return printable(d.Call) + ": " + Short(d.Error)
	case claims.SnapshotEvent:
		d := data[claims.SnapshotData](r)
		return printable(d.At + " " + d.Tree)
	case claims.SessionQuarantined:
		d := data[claims.QuarantinedData](r)
		return fmt.Sprintf("%s (%s): %s", d.Reason, d.Lane, Short(d.Detail))
	case claims.SessionReleased:
		d := data[claims.ReleasedData](r)
		return fmt.Sprintf("as %s by %s%s", printable(d.How), printable(d.By), because(d.Why))
	default: // of a newer version
		return Short(string(r.Data))
	}
}

func describeStart(r claims.Record) string {
	d := data[claims.StepStartedData](r)
	s := ID(r.Step)
	if len(d.Inputs) > 0 {
		s += " with " + Short(strings.Join(d.Inputs, " "))
	}
	if c := d.Continues; c != nil {
		s += fmt.Sprintf(", %s of %s", c.Kind, ID(c.Step))
		if c.Attempt > 0 {
			s += fmt.Sprintf(" (attempt %d)", c.Attempt)
		}
	}
	return s
}

// ID is the beginning of a UUID: enough to tell it from the others on a screen.
func ID[T ~string](id T) string {
	return printable(string(id[:min(len(id), shortID)]))
}

// Short is printable text, cut.
func Short(s string) string {
	if len(s) > mostShown {
		end := mostShown
		for end > 0 && !utf8.RuneStart(s[end]) {
			end--
		}
		s = s[:end] + "…"
	}
	return printable(s)
}

// printable shows control characters, which could command a terminal, as their
// escapes; a tab stays.
func printable(s string) string {
	if !strings.ContainsFunc(s, bad) {
		return s
	}
	var b strings.Builder
	for _, c := range s {
		if bad(c) {
			b.WriteString(strings.Trim(fmt.Sprintf("%q", c), "'"))
		} else {
			b.WriteRune(c)
		}
	}
	return b.String()
}

func bad(c rune) bool { return c != '\t' && (unicode.IsControl(c) || unicode.Is(unicode.Cf, c)) }
