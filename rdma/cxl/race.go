//go:build race

package cxl

// raced: the race detector's atomic stores have no fence behind them, so that the program store-load rightly fails.
const raced = true
