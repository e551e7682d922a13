//! The header of every vsock packet (`struct virtio_vsock_hdr`, virtio 1.2 §5.10.6).

/// `VIRTIO_VSOCK_TYPE_STREAM`, the only type served.
pub const STREAM: u16 = 1;

/// Flags of [`Op::Shutdown`]: the sender will not receive, or not send, any more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
pub const SHUTDOWN_SEND: u32 = 2;

/// CID of the host.
pub const HOST_CID: u64 = 2;

/// `VIRTIO_VSOCK_OP_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    fn from_raw(raw: u16) -> Option<Op> {
        [
            Op::Request,
            Op::Response,
            Op::Reset,
            Op::Shutdown,
            Op::Data,
            Op::CreditUpdate,
            Op::CreditRequest,
        ]
        .into_iter()
        .find(|op| *op as u16 == raw)
    }
}

/// A header, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub source_cid: u64,
    pub destination_cid: u64,
    pub source_port: u32,
    pub destination_port: u32,
    /// Bytes of payload.
    pub length: u32,
    pub kind: u16,
    /// `None` if the specification has no such operation.
    pub op: Option<Op>,
    pub flags: u32,
    /// The size of the sender's receive buffer, and the count of bytes that have left it.
    pub buffer: u32,
    pub forwarded: u32,
}

impl Header {
    /// Bytes on the wire.
    pub const SIZE: usize = 44;

    pub fn from_bytes(raw: &[u8; Header::SIZE]) -> Header {
        let word = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let half = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        Header {
            source_cid: long(0),
            destination_cid: long(8),
            source_port: word(16),
            destination_port: word(20),
            length: word(24),
            kind: half(28),
            op: Op::from_raw(half(30)),
            flags: word(32),
            buffer: word(36),
            forwarded: word(40),
        }
    }

    pub fn to_bytes(self) -> [u8; Header::SIZE] {
        let mut raw = [0; Header::SIZE];
        raw[0..8].copy_from_slice(&self.source_cid.to_le_bytes());
        raw[8..16].copy_from_slice(&self.destination_cid.to_le_bytes());
        raw[16..20].copy_from_slice(&self.source_port.to_le_bytes());
        raw[20..24].copy_from_slice(&self.destination_port.to_le_bytes());
        raw[24..28].copy_from_slice(&self.length.to_le_bytes());
        raw[28..30].copy_from_slice(&self.kind.to_le_bytes());
        raw[30..32].copy_from_slice(&self.op.map_or(0, |op| op as u16).to_le_bytes());
        raw[32..36].copy_from_slice(&self.flags.to_le_bytes());
        raw[36..40].copy_from_slice(&self.buffer.to_le_bytes());
        raw[40..44].copy_from_slice(&self.forwarded.to_le_bytes());
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        /// Any bytes decode, and decode to the same again after encoding, unknown operations aside.
        #[test]
        fn a_header_survives_the_wire(raw in proptest::collection::vec(proptest::num::u8::ANY, Header::SIZE)) {
            let raw: [u8; Header::SIZE] = raw.try_into().unwrap();
            let header = Header::from_bytes(&raw);
            assert_eq!(Header::from_bytes(&header.to_bytes()), header);
        }
    }

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let raw: [u8; Header::SIZE] = std::array::from_fn(|i| i as u8);
        let header = Header::from_bytes(&raw);
        assert_eq!(header.source_cid, 0x0706_0504_0302_0100);
        assert_eq!(header.destination_port, 0x1716_1514);
        assert_eq!(header.kind, 0x1d1c);
        assert_eq!(header.op, None);
        assert_eq!(header.forwarded, 0x2b2a_2928);
    }
}
