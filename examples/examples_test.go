// Package examples holds commands for worker --exec; its tests run them as a
// worker does.
package examples

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/uuid"

	"reveille/claims"
	"reveille/runner"
	"reveille/runner/exec"
)

// step runs a command as a step, with a request that is written by hand, and
// returns what it said and how it ended.
func step(t *testing.T, command, request string) (text string, result runner.Result, err error) {
	t.Helper()
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		t.Fatalf("the exec handler does not run on %s", runtime.GOOS)
	}
	handler, err := exec.New(exec.Options{Command: "cd .. && " + command})
	if err != nil {
		t.Fatal(err)
	}
	var req runner.Request
	if err := json.Unmarshal([]byte(request), &req); err != nil {
		t.Fatal(err)
	}
	req.Step = claims.StepID(uuid.NewString()) // a step's processes are told by it
	req.Killed = make(chan struct{})
	var said strings.Builder // put is called from one goroutine at a time
	put := func(c claims.Content) error {
		said.WriteString(c.Data.(claims.TextData).Text)
		return nil
	}
	refuse := func(string) error { return errors.New("nobody declines here") }
	result, err = handler.Step(context.Background(), req, runner.NewOutput(put, refuse))
	return said.String(), result, err
}

func TestTotal(t *testing.T) {
	t.Parallel()
	const command = "go run ./examples/total"
	for _, tc := range []struct{ name, request, text, result string }{
		{
			"first", `{"session":"till","index":1,"inputs":[{"id":"in_1","delivery":"queue","body":3}],"continues":null,"history":[]}`,
			"the total is 3\n", "3",
		},
		{
			"goes on from the last step that ended", `{"session":"till","index":1,
			"inputs":[{"id":"in_4","delivery":"queue","body":0.5},{"id":"in_5","delivery":"steer","body":2}],"continues":null,
			"history":[
				{"step":"a","inputs":[{"id":"in_1","delivery":"queue","body":3}],"text":"","result":3,"status":"ended"},
				{"step":"b","inputs":[{"id":"in_2","delivery":"queue","body":4}],"text":"","result":7,"status":"ended"},
				{"step":"c","inputs":[{"id":"in_3","delivery":"queue","body":9}],"text":"","result":null,"status":"interrupted"}]}`,
			"the total is 9.5\n", "9.5",
		},
	} {
		text, result, err := step(t, command, tc.request)
		if err != nil || text != tc.text || string(result.Value) != tc.result {
			t.Errorf("%s: said %q with result %s and error %v, want %q and %s", tc.name, text, result.Value, err, tc.text, tc.result)
		}
	}
	_, _, err := step(t, command, `{"session":"till","index":1,"inputs":[{"id":"in_1","delivery":"queue","body":"three"}]}`)
	var failure *runner.Failure
	if !errors.As(err, &failure) || failure.Code != claims.CodeExit || !strings.Contains(failure.Message, "not a number") {
		t.Errorf("a word: %v, want a failure that says that it is not a number", err)
	}
}

func TestLines(t *testing.T) {
	t.Parallel()
	const command = "sh examples/lines.sh"
	file := filepath.Join(t.TempDir(), "three lines")
	if err := os.WriteFile(file, []byte("a\nb\nc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	name, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	// An earlier step's input must not be taken for this one's.
	text, result, err := step(t, command, `{"session":"files","index":1,"inputs":[{"id":"in_2","delivery":"queue","body":`+string(name)+`}],"continues":null,
		"history":[{"step":"a","inputs":[{"id":"in_1","delivery":"queue","body":"go.mod"}],"text":"","result":null,"status":"ended"}]}`)
	if err != nil || strings.Join(strings.Fields(text), " ") != "3 "+file || result.Continue {
		t.Errorf("said %q with error %v, want 3 %s", text, err, file)
	}
	for body, want := range map[string]string{`7`: "must be the name of a file", `"there/is/no such file"`: "No such file"} {
		_, _, err := step(t, command, `{"session":"files","index":1,"inputs":[{"id":"in_1","delivery":"queue","body":`+body+`}]}`)
		var failure *runner.Failure
		if !errors.As(err, &failure) || failure.Code != claims.CodeExit || !strings.Contains(failure.Message, want) {
			t.Errorf("%s: %v, want a failure with %q", body, err, want)
		}
	}
}
