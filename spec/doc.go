// Package spec is the protocol of one claim as an exhaustive model: all that
// two workers, two scanners, callers and an operator can do to one session, in
// every order, with crashes, stalls, lost leases and lost answers in between.
// Its checker visits every state within some bounds, holds the invariants of
// the design against each, and prints the shortest way to one that breaks.
//
// A change of the protocol changes the model first. Each rule of it that
// matters can be broken here by one field of Rules, and the checker must find
// out; a test holds the model's decisions against those of package claims.
//
// Where to begin: state.go says what a state is, actions.go lists what can
// happen, properties.go what must hold. README.md has the bounds, the numbers
// and what is left out.
//
// Not promised: anything beyond the bounds, anything about time, and that the
// SQL does what the model's transactions do; the tests of claims/crdb hold that.
package spec
