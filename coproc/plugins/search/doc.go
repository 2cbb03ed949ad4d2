// Package search builds an inverted index over texts, and asks it.
//
//	quarry job run search --input tree:src --output tree:index
//	quarry search index 'garbage collector'
//
// The index is a tree of two kinds of keys:
//
//	d/NAME   words in the text NAME, in decimal
//	t/WORD   the texts that have it: uvarint length, name, uvarint count, by name
package search
