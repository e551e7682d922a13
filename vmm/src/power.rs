//! How a guest ends its machine: the ACPI sleep and reset registers (ACPI 6.5 §4.8.3.6, §4.8.3.7), and the one keyboard controller command
//! that resets (Linux: `reboot=k`).

use thaw_protocol::control::ExitReason;

/// Sleep control: SLP_TYPx in bits 2..5, SLP_EN in bit 5.
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// Sleep status: always 0, this machine never wakes.
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// Reset: [`RESET_VALUE`] resets.
pub const RESET_PORT: u16 = 0x602;
/// The value that resets, written to [`RESET_PORT`].
pub const RESET_VALUE: u8 = 1;
/// SLP_TYP of soft-off, as `\_S5_` reports it to the guest.
pub const SLEEP_TYPE_S5: u8 = 5;
/// The keyboard controller's command and status port. The status is always 0: ready for the next command.
pub const KEYBOARD_PORT: u16 = 0x64;

/// The keyboard controller's command that pulses the processor's reset line.
const KEYBOARD_PULSE_RESET: u8 = 0xfe;
const SLEEP_ENABLE: u8 = 1 << 5;

/// Why the machine ends if the guest writes `value` to `port`, or `None` if it does not end.
pub fn write(port: u16, value: u8) -> Option<ExitReason> {
    match (port, value) {
        (SLEEP_CONTROL_PORT, value) if value == SLEEP_TYPE_S5 << 2 | SLEEP_ENABLE => {
            Some(ExitReason::PowerOff)
        }
        (RESET_PORT, RESET_VALUE) | (KEYBOARD_PORT, KEYBOARD_PULSE_RESET) => Some(ExitReason::Reset),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_soft_off_and_the_reset_value_end_the_machine() {
        for port in [SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, RESET_PORT, KEYBOARD_PORT] {
            for value in 0..=255 {
                let expected = match (port, value) {
                    (SLEEP_CONTROL_PORT, 0x34) => Some(ExitReason::PowerOff),
                    (RESET_PORT, 1) | (KEYBOARD_PORT, 0xfe) => Some(ExitReason::Reset),
                    _ => None,
                };
                assert_eq!(write(port, value), expected, "port {port:#x} value {value:#x}");
            }
        }
    }
}
