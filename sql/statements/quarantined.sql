SELECT reason, count(*) FROM quarantines GROUP BY reason
