package bus

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"os"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

// inboxPrefix is the prefix of the subjects on which a connection gets its
// answers: as told, or _INBOX and the name of its user. A server's permissions
// can then give each user its own, so that none reads another's answers; one
// that allows all of _INBOX.> allows it as well. Empty: the user has no name
// that fits one token, and the client's own prefix stays.
func inboxPrefix(o Options) string {
	if o.InboxPrefix != "" {
		return o.InboxPrefix
	}
	user := urlUser(o.URL)
	if o.Creds != "" {
		user = credsUser(o.Creds)
	}
	if !validID(user) {
		return ""
	}
	return strings.TrimSuffix(nats.InboxPrefix, ".") + "." + user
}

// urlUser is the user that all servers of a list name. A user without a
// password is a token, a secret, and none.
func urlUser(servers string) string {
	user := ""
	for i, server := range strings.Split(servers, ",") {
		server = strings.TrimSpace(server)
		if !strings.Contains(server, "://") { // as the client takes it
			server = "nats://" + server
		}
		u, err := url.Parse(server)
		if err != nil || u.User == nil {
			return ""
		}
		if _, ok := u.User.Password(); !ok || i > 0 && u.User.Username() != user {
			return ""
		}
		user = u.User.Username()
	}
	return user
}

// credsUser is the name in the JWT of a credentials file; empty where it can't
// be read: connecting says why.
func credsUser(file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	token, err := nkeys.ParseDecoratedJWT(text)
	if err != nil {
		return ""
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return ""
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return ""
	}
	var user struct {
		Name string `json:"name"`
	}
	if json.Unmarshal(payload, &user) != nil {
		return ""
	}
	return user.Name
}
