package follow

// Text puts the live and the durable text of one step together, so that a
// reader sees all of it once, each byte as soon as either brings it. The
// durable text is all of it; the live text is ahead of it, and pieces of it may
// be missing. From the first piece that does not fit on, only the durable text
// counts, and what was shown wrongly is shown again on a line of its own.
type Text struct {
	live, durable int    // bytes of each so far
	ahead         string // what one brought that the other did not yet
	broken        bool
}

// Live takes a piece of live text and returns what of it the reader has not seen.
func (t *Text) Live(s string) string {
	if t.broken {
		return ""
	}
	if t.durable > t.live { // late: the durable text was faster
		n := min(len(s), len(t.ahead))
		if s[:n] != t.ahead[:n] {
			t.broken = true
			return ""
		}
		t.live, t.ahead, s = t.live+n, t.ahead[n:], s[n:]
	}
	t.live += len(s)
	t.ahead += s
	return s
}

// Durable takes the text of a text event and returns what of it the reader has
// not seen.
func (t *Text) Durable(s string) string {
	if t.broken {
		return s
	}
	if t.live > t.durable {
		n := min(len(s), len(t.ahead))
		if same := common(s[:n], t.ahead[:n]); same < n {
			t.broken = true
			return "\n" + s[same:]
		}
		t.durable, t.ahead, s = t.durable+n, t.ahead[n:], s[n:]
	}
	t.durable += len(s)
	t.ahead += s
	return s
}

// common is the length of what both begin with.
func common(a, b string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}
