#include "textflag.h"

// The shared side of a copy is touched by aligned 8-byte and 16-byte moves alone
// (MOVQ, MOVAPS), the private side by whatever fits (MOVUPS).

// func loadWords(to, shared unsafe.Pointer, bytes uint64)
TEXT ·loadWords(SB), NOSPLIT, $0-24
	MOVQ to+0(FP), DI
	MOVQ shared+8(FP), SI
	MOVQ bytes+16(FP), CX
	TESTQ $8, SI
	JZ   aligned
	MOVQ (SI), AX
	MOVQ AX, (DI)
	ADDQ $8, SI
	ADDQ $8, DI
	SUBQ $8, CX

aligned:
	// The first lines are asked for at once, those that follow as far ahead.
	MOVQ CX, DX
	CMPQ DX, $2048
	JLS  near
	MOVQ $2048, DX
near:
	XORQ AX, AX
	CMPQ DX, $512
	JLS  far
ask:
	PREFETCHT0 (SI)(AX*1)
	ADDQ $64, AX
	CMPQ AX, DX
	JB   ask
	XORQ AX, AX
far:
	// While AX+2048+64 <= CX: copy a line and ask for one.
	LEAQ 2112(AX), BX
	CMPQ BX, CX
	JA   lines
	PREFETCHT0 2048(SI)(AX*1)
	MOVAPS (SI)(AX*1), X0
	MOVAPS 16(SI)(AX*1), X1
	MOVAPS 32(SI)(AX*1), X2
	MOVAPS 48(SI)(AX*1), X3
	MOVUPS X0, (DI)(AX*1)
	MOVUPS X1, 16(DI)(AX*1)
	MOVUPS X2, 32(DI)(AX*1)
	MOVUPS X3, 48(DI)(AX*1)
	ADDQ $64, AX
	JMP  far
lines:
	LEAQ 64(AX), BX
	CMPQ BX, CX
	JA   rest
	MOVAPS (SI)(AX*1), X0
	MOVAPS 16(SI)(AX*1), X1
	MOVAPS 32(SI)(AX*1), X2
	MOVAPS 48(SI)(AX*1), X3
	MOVUPS X0, (DI)(AX*1)
	MOVUPS X1, 16(DI)(AX*1)
	MOVUPS X2, 32(DI)(AX*1)
	MOVUPS X3, 48(DI)(AX*1)
	ADDQ $64, AX
	JMP  lines
rest:
	LEAQ 16(AX), BX
	CMPQ BX, CX
	JA   last
	MOVAPS (SI)(AX*1), X0
	MOVUPS X0, (DI)(AX*1)
	ADDQ $16, AX
	JMP  rest
last:
	CMPQ AX, CX
	JAE  done
	MOVQ (SI)(AX*1), DX
	MOVQ DX, (DI)(AX*1)
done:
	RET

// func storeWords(shared, from unsafe.Pointer, bytes uint64)
TEXT ·storeWords(SB), NOSPLIT, $0-24
	MOVQ shared+0(FP), DI
	MOVQ from+8(FP), SI
	MOVQ bytes+16(FP), CX
	TESTQ $8, DI
	JZ   aligned
	MOVQ (SI), AX
	MOVQ AX, (DI)
	ADDQ $8, SI
	ADDQ $8, DI
	SUBQ $8, CX

aligned:
	XORQ AX, AX
lines:
	LEAQ 64(AX), BX
	CMPQ BX, CX
	JA   rest
	MOVUPS (SI)(AX*1), X0
	MOVUPS 16(SI)(AX*1), X1
	MOVUPS 32(SI)(AX*1), X2
	MOVUPS 48(SI)(AX*1), X3
	MOVAPS X0, (DI)(AX*1)
	MOVAPS X1, 16(DI)(AX*1)
	MOVAPS X2, 32(DI)(AX*1)
	MOVAPS X3, 48(DI)(AX*1)
	ADDQ $64, AX
	JMP  lines
rest:
	LEAQ 16(AX), BX
	CMPQ BX, CX
	JA   last
	MOVUPS (SI)(AX*1), X0
	MOVAPS X0, (DI)(AX*1)
	ADDQ $16, AX
	JMP  rest
last:
	CMPQ AX, CX
	JAE  done
	MOVQ (SI)(AX*1), DX
	MOVQ DX, (DI)(AX*1)
done:
	RET

// func askFor(shared unsafe.Pointer, bytes uint64)
TEXT ·askFor(SB), NOSPLIT, $0-16
	MOVQ shared+0(FP), SI
	MOVQ bytes+8(FP), CX
	ADDQ SI, CX
	ANDQ $~63, SI
ask:
	PREFETCHT0 (SI)
	ADDQ $64, SI
	CMPQ SI, CX
	JB   ask
	RET
