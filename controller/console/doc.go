// Package console is the web page of a controller: what the cluster looks like at
// this moment, and what has happened lately. It only reads.
//
// A Console asks controllers as any operator would, about once a second while
// the page is open, and keeps the last rates and events in memory. The page is
// embedded and needs nothing from elsewhere.
//
//	GET /                           the page
//	GET /console/state              Snapshot as JSON
//	GET /console/blocks?node=&region=   RegionMap.Blocks, 3 bytes for each block
package console
