package permissionstest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/conf"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// key makes a key, and says its public part.
func key(t testing.TB, create func() (nkeys.KeyPair, error)) (nkeys.KeyPair, string) {
	t.Helper()
	k, err := create()
	if err != nil {
		t.Fatal(err)
	}
	public, err := k.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return k, public
}

// account is one of a file of deploy/nats, with a key of its own.
type account struct {
	key    nkeys.KeyPair
	public string
	config map[string]any
}

// startWithCreds starts a server on which users have credentials files. Its
// accounts, their exports and imports and the users' permissions are those of
// the namespace rv in deploy/nats, each signed. It returns the files by role.
func startWithCreds(t testing.TB) (s *natsServer, creds map[string]string) {
	t.Helper()
	for _, role := range roles {
		t.Setenv(passwordVariable("rv-"+role), "none") // the file asks for them
	}
	file, err := conf.ParseFile(filepath.Join(deployed, "rv.conf"))
	if err != nil {
		t.Fatal(err)
	}
	accounts := map[string]account{}
	for name, config := range file {
		k, public := key(t, nkeys.CreateAccount)
		accounts[name] = account{k, public, config.(map[string]any)}
	}
	operator, operatorKey := key(t, nkeys.CreateOperator)
	_, systemKey := key(t, nkeys.CreateAccount)
	resolver := &server.MemAccResolver{}
	sign := func(c *jwt.AccountClaims) {
		text, err := c.Encode(operator)
		if err == nil {
			err = resolver.Store(c.Subject, text)
		}
		if err != nil {
			t.Fatalf("account %s: %v", c.Name, err)
		}
	}
	sysClaims := jwt.NewAccountClaims(systemKey)
	sysClaims.Name = "SYS"
	sign(sysClaims)
	creds = map[string]string{}
	for name, a := range accounts {
		sign(accountClaims(t, name, a, accounts))
		for user, permissions := range usersOf(a.config) {
			creds[user] = credsFile(t, a, user, permissions)
		}
	}
	certs := newCertificates(t)
	return startServer(t, &server.Options{
		ServerName: "reveille-creds", JetStream: true, TLS: true, TLSConfig: certs.tlsConfig(t), TLSTimeout: patience.Seconds(),
		TrustedOperators: []*jwt.OperatorClaims{jwt.NewOperatorClaims(operatorKey)}, SystemAccount: systemKey, AccountResolver: resolver,
	}, certs.ca), creds
}

// accountClaims is an account's part of the file, as its operator signs it.
func accountClaims(t testing.TB, name string, a account, accounts map[string]account) *jwt.AccountClaims {
	t.Helper()
	c := jwt.NewAccountClaims(a.public)
	c.Name = name
	if limits, ok := a.config["jetstream"].(map[string]any); ok {
		c.Limits.JetStreamLimits = jwt.JetStreamLimits{
			DiskStorage: limits["max_file"].(int64), MemoryStorage: limits["max_mem"].(int64),
			Streams: limits["max_streams"].(int64), Consumer: limits["max_consumers"].(int64),
		}
	}
	for _, e := range list(a.config["exports"]) {
		kind, subject := kindOf(e.(map[string]any))
		export := &jwt.Export{Name: subject.(string), Subject: jwt.Subject(subject.(string)), Type: kind, TokenReq: true}
		if e.(map[string]any)["response"] == "stream" {
			export.ResponseType = jwt.ResponseTypeStream
		}
		c.Exports.Add(export)
	}
	for _, i := range list(a.config["imports"]) {
		kind, from := kindOf(i.(map[string]any))
		exporter := accounts[from.(map[string]any)["account"].(string)]
		subject := jwt.Subject(from.(map[string]any)["subject"].(string))
		token := jwt.NewActivationClaims(a.public)
		token.ImportSubject, token.ImportType = subject, kind
		text, err := token.Encode(exporter.key)
		if err != nil {
			t.Fatal(err)
		}
		c.Imports.Add(&jwt.Import{Name: string(subject), Subject: subject, Account: exporter.public, Token: text, Type: kind})
	}
	return c
}

// kindOf is what an export or an import is of.
func kindOf(entry map[string]any) (jwt.ExportType, any) {
	if s, ok := entry["stream"]; ok {
		return jwt.Stream, s
	}
	return jwt.Service, entry["service"]
}

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

// usersOf are the users of an account with their permissions.
func usersOf(config map[string]any) map[string]map[string]any {
	users := map[string]map[string]any{}
	for _, u := range list(config["users"]) {
		user := u.(map[string]any)
		permissions, _ := user["permissions"].(map[string]any)
		users[user["user"].(string)] = permissions
	}
	return users
}

// allowed are the subjects that a user may publish or subscribe.
func allowed(permissions map[string]any, what string) (subjects []string) {
	part, _ := permissions[what].(map[string]any)
	for _, s := range list(part["allow"]) {
		subjects = append(subjects, s.(string))
	}
	return subjects
}

// credsFile is what --nats-creds takes.
func credsFile(t testing.TB, a account, user string, permissions map[string]any) string {
	t.Helper()
	k, public := key(t, nkeys.CreateUser)
	c := jwt.NewUserClaims(public)
	c.Name = user
	c.Pub.Allow.Add(allowed(permissions, "publish")...)
	c.Sub.Allow.Add(allowed(permissions, "subscribe")...)
	token, err := c.Encode(a.key)
	if err != nil {
		t.Fatal(err)
	}
	seed, err := k.Seed()
	if err != nil {
		t.Fatal(err)
	}
	text, err := jwt.FormatUserConfig(token, seed)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), user+".creds")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
