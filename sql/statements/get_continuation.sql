SELECT body FROM continuations WHERE session_id = $1::TEXT AND number = $2::INT8
