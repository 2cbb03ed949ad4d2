// Package nearest finds the vectors that are most like one.
//
//	quarry job run nearest --input tree:vectors --output tree:found --arg query=0.1,0.9,0.3 --arg k=10
//
// Values of the input are vectors: float32, little endian. Those of other lengths
// than the query's are skipped and counted in the log. The output has the keys
// 0001, 0002, ...: cosine of the angle, a space, the vector's key.
package nearest
