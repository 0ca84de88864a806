package devstate

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// The servers of a dev are those of flags that nobody set, for commands that look for one.
func TestDiscovery(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, File), []byte(`{"nats_url":"nats://dev","database_url":"postgres://dev","namespace":"ns"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("RV_NATS_URL", "nats://env")
	for args, want := range map[string]string{
		"--dev-state " + dir: "postgres://dev nats://env ns", // the environment wins
		"--dev-state " + dir + " --database-url postgres://x":         "postgres://x nats://env ns",
		"--database-url postgres://x":                                 "postgres://x nats://env rv", // nobody looks for one
		"--dev-state " + dir + "/none --database-url postgres://x":    "no reveille dev runs on " + dir + "/none",
		"--dev-state=" + dir + " --nats-url nats://x --namespace rv2": "postgres://dev nats://x rv2",
		"": "missing flags: --database-url",
	} {
		var cli struct {
			DatabaseURL string `required:"" placeholder:"URL"`
			NATSURL     string `name:"nats-url" default:"nats://default"`
			Namespace   string `default:"rv"`
			DevState    string `env:"-"`
		}
		parser, err := kong.New(&cli, kong.DefaultEnvars("RV"), kong.Resolvers(&Discovery{}))
		if err != nil {
			t.Fatal(err)
		}
		_, err = parser.Parse(strings.Fields(args))
		got := cli.DatabaseURL + " " + cli.NATSURL + " " + cli.Namespace
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", args, got, want)
		}
	}
}
