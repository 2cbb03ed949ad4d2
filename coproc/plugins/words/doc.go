// Package words counts words: the job that every such system is shown with.
//
//	quarry job run words --input tree:src --output tree:counts
//
// The output has a key for each word; its value is the count in decimal.
package words
