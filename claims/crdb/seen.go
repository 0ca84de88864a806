package crdb

import (
	"sync"

	"reveille/claims"
)

// seenMost bounds how many sessions are remembered to exist: twice this.
const seenMost = 1 << 15

// seen remembers sessions that exist; a session's row never goes. It forgets
// the half that was not asked for longest.
type seen struct {
	mu         sync.Mutex
	young, old map[claims.SessionID]struct{}
}

func (s *seen) has(id claims.SessionID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.young[id]; ok {
		return true
	}
	_, ok := s.old[id]
	if ok {
		s.keep(id)
	}
	return ok
}

func (s *seen) add(id claims.SessionID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep(id)
}

func (s *seen) keep(id claims.SessionID) {
	if s.young == nil || len(s.young) >= seenMost {
		s.old, s.young = s.young, make(map[claims.SessionID]struct{})
	}
	s.young[id] = struct{}{}
}
