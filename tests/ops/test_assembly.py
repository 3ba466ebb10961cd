"""Faults of an assembler are found in machine code as nvdisasm prints it."""

import pytest

from tests.ops._assembly import unwritten

#: A loop with a product whose second operand lies at UR18 and UR19.
CODE = """
.text.kernel:
        /*0000*/                   ULDC.64 UR12, c[0x0][0x210] ;
        /*0010*/                   UIADD3.64 UR16, UR12, 0x2, URZ ;
        /*0020*/                   S2UR UR22, SR_CTAID.X ;
        /*0030*/                   UIADD3 UR18, UP0, UR22, 0x40, URZ ;
        /*0040*/                   UIADD3.X UR19, UR22, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   UMOV UR4, 0x1 ;
.L_x_0:
        /*0070*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR16].tnspB, R24 ;
        /*0080*/                   HGMMA.64x32x16.F32.BF16 R24, R56, gdesc[UR16].tnspB, R24, gsb0 ;
        /*0090*/              @!P1 BRA `(.L_x_0) ;
.L_x_1:
        /*00a0*/                   EXIT ;
"""


OFFSETS = ["UIADD3 UR18, UP0, UR22, 0x40, URZ", "UIADD3.X UR19, UR22, -0x7fffffe0, URZ, UP0, !UPT"]
PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR16].tnspB, R24"


@pytest.mark.parametrize(
    ("part", "changed", "found"),
    [
        ("", "", []),
        ("ULDC.64", "ULDC", ["UIADD3.64 UR16, UR12, 0x2, URZ"]),
        ("UIADD3.64 UR16", "UIADD3.64 UR14", [PRODUCT]),  # the other product has its first operand in registers
        ("S2UR UR22", "S2UR UR23", OFFSETS),
        ("EXIT", "STS [UR4], R0", ["STS [UR4], R0"]),  # a jump around the loop leads there
    ],
)
def test_registers_that_nothing_has_written(part: str, changed: str, found: list[str]):
    assert unwritten(CODE.replace(part, changed, 1) if part else CODE) == found
