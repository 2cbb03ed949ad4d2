// Package kvfile reads and writes keys and values as CSV and as JSON lines.
//
//	key,value                       {"key":"ada","value":"lovelace"}
//	ada,lovelace                    {"key_base64":"AP8=","value_hex":"00ff"}
//
// Columns and fields say how they are encoded: key, key_hex, key_base64, and the same
// for values. A file ends with a newline: one that does not has been cut off, and is
// refused there. Errors name the line.
package kvfile
