package bus

import (
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// delays are a policy of waiting between attempts: base, doubled each time, at
// most most, with the upper half left to chance so that many don't come at once.
type delays struct{ base, most time.Duration }

var (
	publishBackoff = delays{50 * time.Millisecond, 2 * time.Second}
	watchBackoff   = delays{100 * time.Millisecond, 5 * time.Second}
	applyBackoff   = delays{100 * time.Millisecond, 5 * time.Second}
	streamBackoff  = delays{100 * time.Millisecond, 2 * time.Second}
	pullBackoff    = delays{100 * time.Millisecond, 2 * time.Second}
	noteBackoff    = delays{200 * time.Millisecond, 5 * time.Second}
	relayBackoff   = delays{20 * time.Millisecond, 5 * time.Second}
)

// backoff is the delay before attempt try+1, try counting from 0.
func backoff(try int, p delays) time.Duration {
	d := p.most
	if try < 16 { // 2^16 × any base is past any most
		d = min(p.base<<max(try, 0), p.most)
	}
	return d/2 + rand.N(d/2+1)
}

// stateLog logs a trouble when it begins and when it is over, not each time it
// shows. The zero value with a log is ready.
type stateLog struct {
	log *slog.Logger
	// quiet is how long nothing must have failed before it is over, where
	// successes and failures of many mix.
	quiet time.Duration

	mu      sync.Mutex
	failing bool
	last    time.Time
}

func (s *stateLog) fail(msg string, args ...any) {
	s.mu.Lock()
	began := !s.failing
	s.failing, s.last = true, time.Now()
	s.mu.Unlock()
	if began {
		s.log.Warn(msg, args...)
	}
}

func (s *stateLog) ok(msg string, args ...any) {
	s.mu.Lock()
	over := s.failing && time.Since(s.last) >= s.quiet
	if over {
		s.failing = false
	}
	s.mu.Unlock()
	if over {
		s.log.Info(msg, args...)
	}
}

// orDiscard is the logger of an option that may be nil.
func orDiscard(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}
