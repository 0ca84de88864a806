package main

import (
	"context"
	"fmt"
	"net/url"
	"strings"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"

	"reveille/internal/faultproxy"
)

// link is a TCP connection's way from one process to one server, which can be cut, delayed, half open or narrow.
type link struct {
	proxy *toxiproxy.Proxy
	addr  string // where the process finds the server
}

// links makes links.
type links struct{ server *toxiproxy.ApiServer }

func newLinks() links {
	zerolog.SetGlobalLevel(zerolog.Disabled) // toxics have a logger of their own
	return links{toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())}
}

func (ls links) add(name, upstream string) (*link, error) {
	p := toxiproxy.NewProxy(ls.server, name, "127.0.0.1:0", upstream)
	if err := ls.server.Collection.Add(p, true); err != nil {
		return nil, fmt.Errorf("link %s: %w", name, err)
	}
	return &link{proxy: p, addr: p.Listen}, nil
}

func (ls links) close() {
	for _, p := range ls.server.Collection.Proxies() {
		p.Stop()
	}
}

// cut closes all connections and refuses new ones.
func (l *link) cut() { l.proxy.Stop() }

// heal takes away whatever is wrong with a link.
func (l *link) heal() error {
	l.proxy.Toxics.ResetToxics(context.Background())
	if err := l.proxy.Start(); err != nil && err != toxiproxy.ErrProxyAlreadyStarted {
		return fmt.Errorf("link %s: %w", l.proxy.Name, err)
	}
	return nil
}

// Directions of a link.
const (
	up   = "upstream"   // to the server
	down = "downstream" // from it
)

// spoil puts a toxic on a link, in one direction.
func (l *link) spoil(toxic, direction, attributes string) error {
	_, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(
		`{"type":%q,"stream":%q,"attributes":{%s}}`, toxic, direction, attributes)))
	if err != nil {
		return fmt.Errorf("link %s, %s: %w", l.proxy.Name, toxic, err)
	}
	return nil
}

// door is a process's way to the database: a link to a proxy that knows the protocol and lets transactions fail, in front
// of the server. Three of them stand behind each link: one with the right time, and one each that is early and late.
type door struct {
	link    *link
	url     string
	gateway [3]*faultproxy.Proxy
}

// newDoor makes the way of a process to a database.
func (ls links) newDoor(name, databaseURL string) (*door, error) {
	d := &door{}
	u, err := url.Parse(databaseURL)
	if err != nil {
		return nil, err
	}
	for i := range d.gateway {
		if d.gateway[i], err = faultproxy.New(databaseURL, skews[i]); err != nil {
			return nil, err
		}
	}
	if d.link, err = ls.add(name+" to the database", d.host(0)); err != nil {
		return nil, err
	}
	u.Host = d.link.addr
	d.url = u.String()
	return d, nil
}

// host is the address of a gateway.
func (d *door) host(gateway int) string {
	u, err := url.Parse(d.gateway[gateway].URL())
	if err != nil {
		panic(err) // it was made of one
	}
	return u.Host
}

// turn lets the link lead to another gateway, from the next connection on; those that are open are cut.
func (d *door) turn(gateway int) error {
	p := d.link.proxy
	return p.Update(&toxiproxy.Proxy{Listen: p.Listen, Upstream: d.host(gateway), Enabled: true})
}

func (d *door) close() {
	for _, g := range d.gateway {
		if g != nil {
			g.Close()
		}
	}
}
