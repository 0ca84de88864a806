package crdb

// PrepareConn prepares a connection as the store does, for the tests of plans.
var PrepareConn = prepareConn
