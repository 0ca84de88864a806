package claims

import "encoding/json"

// The data of the events, as docs/contract.md section 2 names their fields.
type (
	// InputAdmittedData is the data of input.admitted.
	InputAdmittedData struct {
		Input    string   `json:"input"`
		Delivery Delivery `json:"delivery"`
		Armed    bool     `json:"armed"`
	}
	// InputData is the data of input.promoted.
	InputData struct {
		Input string `json:"input"`
	}
	// InputCancelledData is the data of input.cancelled.
	InputCancelledData struct {
		Input  string `json:"input"`
		Reason string `json:"reason"`
	}
	// ReasonData is the data of wake.cancelled and execution.cancelling.
	ReasonData struct {
		Reason string `json:"reason"`
	}
	// ContinuationCancelledData is the data of continuation.cancelled.
	ContinuationCancelledData struct {
		Reason string           `json:"reason"`
		Step   StepID           `json:"step"`
		Kind   ContinuationKind `json:"kind"`
	}
	// ExecutionStartedData is the data of execution.started.
	ExecutionStartedData struct {
		Worker   string `json:"worker"`
		Recovery int    `json:"recovery"`
	}
	// ExecutionEndedData is the data of execution.ended.
	ExecutionEndedData struct {
		Outcome ExecutionOutcome `json:"outcome"`
	}
	// StepStartedData is the data of step.started.
	StepStartedData struct {
		Index     int        `json:"index"`
		Inputs    []string   `json:"inputs"`
		Continues *Continues `json:"continues"`
	}
	// StepEndedData is the data of step.ended.
	StepEndedData struct {
		Result   json.RawMessage `json:"result"`
		Continue bool            `json:"continue"`
	}
	// StepInterruptedData is the data of step.interrupted.
	StepInterruptedData struct {
		Reason string `json:"reason"`
		Joined bool   `json:"joined"`
	}
	// TextData is the data of text.
	TextData struct {
		Text string `json:"text"`
	}
	// ToolCalledData is the data of tool.called.
	ToolCalledData struct {
		Call  string          `json:"call"`
		Name  string          `json:"name"`
		Input json.RawMessage `json:"input"`
	}
	// ToolSucceededData is the data of tool.succeeded.
	ToolSucceededData struct {
		Call   string          `json:"call"`
		Output json.RawMessage `json:"output"`
	}
	// ToolFailedData is the data of tool.failed.
	ToolFailedData struct {
		Call  string `json:"call"`
		Error string `json:"error"`
	}
	// SnapshotData is the data of snapshot.
	SnapshotData struct {
		At   string `json:"at"` // before or after
		Tree string `json:"tree"`
	}
	// QuarantinedData is the data of session.quarantined.
	QuarantinedData struct {
		Lane   string `json:"lane"` // claims, recovery or owner
		Reason Reason `json:"reason"`
		Detail string `json:"detail"`
	}
	// ReleasedData is the data of session.released.
	ReleasedData struct {
		How string `json:"how"` // retry, interrupted or discard
		By  string `json:"by"`
		Why string `json:"why"`
	}
)
