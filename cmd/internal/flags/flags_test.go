package flags

import (
	"strings"
	"testing"
	"time"
)

// A number without a unit says nothing: durations have theirs in either format.
func TestDurationsInLogs(t *testing.T) {
	for format, want := range map[string]string{"json": `"after":"1.5s"`, "text": "after=1.5s"} {
		var out strings.Builder
		Log{LogLevel: "info", LogFormat: format}.Logger(&out).Info("x", "after", 1500*time.Millisecond)
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s: %s, want %s", format, out.String(), want)
		}
	}
}
