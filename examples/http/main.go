// Command http is a handler behind a URL: it counts to ten, a line a second,
// and stops when its step is interrupted.
//
//	go run ./examples/http
//	reveille dev --handler http --http-url http://127.0.0.1:8080/step
//	reveille wake s1 --input '"hello"' --wait
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"time"
)

func main() {
	http.HandleFunc("POST /step", step)
	log.Fatal(http.ListenAndServe("127.0.0.1:8080", nil))
}

func step(w http.ResponseWriter, r *http.Request) {
	var request struct{ Inputs json.RawMessage }
	body, err := io.ReadAll(r.Body) // to its end: only after it does the server see that the request is closed
	if err == nil {
		err = json.Unmarshal(body, &request)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest) // fails the step, with this line in its message
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	fmt.Fprintf(w, "got %s\n", request.Inputs) // a line that is no JSON object is text
	for n := range 10 {
		fmt.Fprintf(w, "%d of 10\n", n+1)
		w.(http.Flusher).Flush()
		select {
		case <-time.After(time.Second):
		case <-r.Context().Done(): // interrupted: nobody reads on
			return
		}
	}
	fmt.Fprintln(w, `{"type":"ended","result":"counted to ten"}`)
}
