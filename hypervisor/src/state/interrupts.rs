//! The state of the interrupt controllers that vCPUs share, and its parts.

use kvm_bindings::{KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip};

use super::{StateError, decode_struct, sorted, to_bytes};

/// The parts of the interrupt controllers' state. The numbers are those of the state file and never change.
/// Each is the `struct kvm_irqchip` (520 bytes) of a chip (KVM_GET_IRQCHIP).
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InterruptPart {
    /// 1: the first 8259A (chip_id 0).
    PicMaster = 1,
    /// 2: the second 8259A (chip_id 1).
    PicSlave = 2,
    /// 3: the IOAPIC (chip_id 2).
    Ioapic = 3,
}

impl InterruptPart {
    /// Every part in the order of their numbers, in which they are written.
    pub const ALL: [InterruptPart; 3] = [
        InterruptPart::PicMaster,
        InterruptPart::PicSlave,
        InterruptPart::Ioapic,
    ];

    /// KVM's number of the chip.
    pub(crate) fn chip_id(self) -> u32 {
        match self {
            InterruptPart::PicMaster => KVM_IRQCHIP_PIC_MASTER,
            InterruptPart::PicSlave => KVM_IRQCHIP_PIC_SLAVE,
            InterruptPart::Ioapic => KVM_IRQCHIP_IOAPIC,
        }
    }
}

impl TryFrom<u16> for InterruptPart {
    type Error = StateError;

    fn try_from(number: u16) -> Result<InterruptPart, StateError> {
        InterruptPart::ALL
            .into_iter()
            .find(|&part| part as u16 == number)
            .ok_or(StateError::Unknown {
                what: "interrupt controller",
                number,
            })
    }
}

/// Both PICs and the IOAPIC, from [`crate::Vm::save_interrupts`].
#[derive(Clone)]
pub struct InterruptState {
    /// In the order of [`InterruptPart::ALL`], each with that part's chip id.
    pub(crate) chips: [kvm_irqchip; 3],
}

impl std::fmt::Debug for InterruptState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Print chip ids only, because they determine which union field is valid.
        f.debug_list()
            .entries(self.chips.iter().map(|c| c.chip_id))
            .finish()
    }
}

impl InterruptState {
    /// Encodes every part of [`InterruptPart::ALL`], in that order.
    pub fn parts(&self) -> Vec<(InterruptPart, Vec<u8>)> {
        InterruptPart::ALL
            .into_iter()
            .zip(&self.chips)
            .map(|(part, chip)| (part, to_bytes(chip)))
            .collect()
    }

    /// Decodes the state from its parts, in any order.
    ///
    /// # Errors
    /// [`StateError`] with the part that is missing, duplicate or invalid.
    pub fn from_parts(parts: &[(InterruptPart, &[u8])]) -> Result<InterruptState, StateError> {
        let bytes = sorted(InterruptPart::ALL, parts)?;
        let mut chips = [kvm_irqchip::default(); 3];
        for ((chip, bytes), part) in chips.iter_mut().zip(bytes).zip(InterruptPart::ALL) {
            *chip = decode_struct(part, bytes)?;
            if chip.chip_id != part.chip_id() {
                return Err(StateError::Content {
                    part: format!("{part:?}"),
                    what: "the state of another chip",
                });
            }
        }
        Ok(InterruptState { chips })
    }
}
