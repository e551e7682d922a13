//! Decimal numbers in tar: PAX records and sparse maps write them as ASCII digits.

/// The value of ASCII digits; `None` for other characters and for values of more than 64 bits.
pub fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| match digit {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}
