#include "textflag.h"

// func cvap(at unsafe.Pointer, bytes, line uint64)
TEXT ·cvap(SB), NOSPLIT, $0-24
	MOVD at+0(FP), R0
	MOVD bytes+8(FP), R1
	MOVD line+16(FP), R2
	ADD  R0, R1, R1
	SUB  $1, R2, R3
	BIC  R3, R0, R0
lines:
	WORD $0xd50b7c20 // DC CVAP, X0
	ADD  R2, R0, R0
	CMP  R1, R0
	BLO  lines
	RET

// func dsb()
TEXT ·dsb(SB), NOSPLIT, $0-0
	DSB $15 // SY
	RET

// func ctr() uint64
TEXT ·ctr(SB), NOSPLIT, $0-8
	MRS  CTR_EL0, R0
	MOVD R0, ret+0(FP)
	RET
