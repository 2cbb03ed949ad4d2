// Command generate writes the table of rights into docs/SECURITY.md.
package main

import (
	"log"
	"os"
	"strings"

	"github.com/quarrystore/quarry/internal/rights"
)

func main() {
	const page = "../../docs/SECURITY.md"
	b, err := os.ReadFile(page)
	if err != nil {
		log.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), rights.Begin)
	_, after, end := strings.Cut(rest, rights.End)
	if !ok || !end {
		log.Fatalf("%s: no place for the table", page)
	}
	if err := os.WriteFile(page, []byte(before+rights.Begin+rights.Markdown()+rights.End+after), 0o644); err != nil {
		log.Fatal(err)
	}
}
