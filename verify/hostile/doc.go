// Package hostile attacks the ports of real processes from outside, as a peer without the
// cluster's token can: it measures what an attack costs the process in memory, and that
// clients with the token go on.
package hostile
