// Package ddio reads and sets where the WRITEs of an adapter go first: into the processors' caches (Intel's Data Direct
// I/O), or past them to the memory controller. The switch is in the root port that the adapter is behind, so it holds for all
// devices behind it, and its place differs from part to part: ports that are not in the table are refused.
package ddio
