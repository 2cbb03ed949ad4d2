// Command odd has a function of every kind of signature. Its test edits each.
package main

import "fmt"

type pair[K comparable, V any] struct {
	key K
	val V
}

type num int

func (p *pair[K, V]) first() K { return p.key }

func (num) unnamed(int, string) int { return 1 }

func (_ *num) blank(_, b int, _ ...string) (sum int, err error) {
	sum = b
	return // the edit is behind this comment
}

func most[T int | string](first T, rest ...T) T {
	for _, r := range rest {
		first = max(first, r)
	}
	return first
}

func says(to *string) { *to = "plain" }

func twice() (a, b int) { a = 1; b = 1; return a, b }

func main() {
	var n num
	p := pair[string, int]{"key", 2}
	sum, err := n.blank(1, 2, "a", "b")
	var said string
	says(&said)
	a, b := twice()
	fmt.Println(p.first(), n.unnamed(1, ""), sum, err, most(1, 3, 2), most("a"), said, a, b)
}
