// Command total keeps a running total and stores nothing: each input is a
// number, and the total so far is the result of the session's last step.
//
//	reveille dev --exec 'go run ./examples/total'
//	reveille wake till --input 3 --wait
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

func main() {
	var request struct {
		Inputs  []struct{ Body float64 }
		History []struct {
			Status string
			Result float64
		}
	}
	if err := json.NewDecoder(os.Stdin).Decode(&request); err != nil {
		fmt.Fprintln(os.Stderr, "not a number:", err)
		os.Exit(1) // fails the step, with this line as its message
	}
	total := 0.0
	for _, step := range request.History { // oldest first
		if step.Status == "ended" {
			total = step.Result
		}
	}
	for _, input := range request.Inputs {
		total += input.Body
	}
	fmt.Println("the total is", total)
	fmt.Printf(`{"type":"ended","result":%v}`+"\n", total)
}
