//go:build race

package systemtest

func init() { race = true }
