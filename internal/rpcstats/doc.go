// Package rpcstats counts the calls that a service of the control plane answers:
// how many by method and outcome, and how long they took.
//
//	var calls rpcstats.Calls
//	handler := quarrypbconnect.NewControllerHandler(s, connect.WithInterceptors(&calls))
package rpcstats
