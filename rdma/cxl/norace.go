//go:build !race

package cxl

const raced = false
