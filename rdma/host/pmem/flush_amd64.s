#include "textflag.h"

// func cpuid(leaf, sub uint32) (a, b, c, d uint32)
TEXT ·cpuid(SB), NOSPLIT, $0-24
	MOVL leaf+0(FP), AX
	MOVL sub+4(FP), CX
	CPUID
	MOVL AX, a+8(FP)
	MOVL BX, b+12(FP)
	MOVL CX, c+16(FP)
	MOVL DX, d+20(FP)
	RET

// func clflush(at unsafe.Pointer, bytes uint64)
TEXT ·clflush(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), SI
	MOVQ bytes+8(FP), CX
	ADDQ SI, CX
	ANDQ $~63, SI
line:
	CLFLUSH (SI)
	ADDQ $64, SI
	CMPQ SI, CX
	JB   line
	RET

// func clflushopt(at unsafe.Pointer, bytes uint64)
TEXT ·clflushopt(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), SI
	MOVQ bytes+8(FP), CX
	ADDQ SI, CX
	ANDQ $~63, SI
line:
	CLFLUSHOPT (SI)
	ADDQ $64, SI
	CMPQ SI, CX
	JB   line
	RET

// func clwb(at unsafe.Pointer, bytes uint64)
TEXT ·clwb(SB), NOSPLIT, $0-16
	MOVQ at+0(FP), SI
	MOVQ bytes+8(FP), CX
	ADDQ SI, CX
	ANDQ $~63, SI
line:
	CLWB (SI)
	ADDQ $64, SI
	CMPQ SI, CX
	JB   line
	RET

// func movnti(to, from unsafe.Pointer, bytes uint64)
TEXT ·movnti(SB), NOSPLIT, $0-24
	MOVQ to+0(FP), DI
	MOVQ from+8(FP), SI
	MOVQ bytes+16(FP), CX
	XORQ AX, AX
lines:
	LEAQ 64(AX), BX
	CMPQ BX, CX
	JA   words
	MOVQ (SI)(AX*1), R8
	MOVQ 8(SI)(AX*1), R9
	MOVQ 16(SI)(AX*1), R10
	MOVQ 24(SI)(AX*1), R11
	MOVNTIQ R8, (DI)(AX*1)
	MOVNTIQ R9, 8(DI)(AX*1)
	MOVNTIQ R10, 16(DI)(AX*1)
	MOVNTIQ R11, 24(DI)(AX*1)
	MOVQ 32(SI)(AX*1), R8
	MOVQ 40(SI)(AX*1), R9
	MOVQ 48(SI)(AX*1), R10
	MOVQ 56(SI)(AX*1), R11
	MOVNTIQ R8, 32(DI)(AX*1)
	MOVNTIQ R9, 40(DI)(AX*1)
	MOVNTIQ R10, 48(DI)(AX*1)
	MOVNTIQ R11, 56(DI)(AX*1)
	MOVQ BX, AX
	JMP  lines
words:
	CMPQ AX, CX
	JAE  done
	MOVQ (SI)(AX*1), R8
	MOVNTIQ R8, (DI)(AX*1)
	ADDQ $8, AX
	JMP  words
done:
	RET

// func sfence()
TEXT ·sfence(SB), NOSPLIT, $0-0
	SFENCE
	RET
