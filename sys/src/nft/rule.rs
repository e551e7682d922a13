//! One rule of an IPv4 table, built of the expressions that the kernel evaluates in order: matches, then a verdict.
//!
//! The names are those of nft(8): each method documents the tool's syntax.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;

use crate::netlink::Attributes;
use crate::prefix::Prefix;

// include/uapi/linux/netfilter/nf_tables.h
const LIST_ELEM: u16 = 1;
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const VERDICT_CHAIN: u16 = 2;
/// NFT_REG32_00: registers of four bytes; a larger value occupies the following ones too.
const REG: u32 = 8;
const REG_VERDICT: u32 = 0;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
const META_L4PROTO: u32 = 16;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const SOURCE_ADDRESS: u32 = 12;
const DESTINATION_ADDRESS: u32 = 16;
const DESTINATION_PORT: u32 = 2;
const TCP_FLAGS: u32 = 13;
const CMP_EQ: u32 = 0;
const CMP_NEQ: u32 = 1;
const CMP_LTE: u32 = 3;
const CMP_GTE: u32 = 5;
const CT_STATE: u32 = 0;
const CT_DIRECTION: u32 = 1;
const CT_STATUS: u32 = 2;
const IPS_DST_NAT: u32 = 1 << 5;
const FIB_ADDRTYPE: u32 = 3;
const FIB_DADDR: u32 = 2;
const RTN_LOCAL: u32 = 2;
const NAT_SNAT: u32 = 0;
const NAT_DNAT: u32 = 1;
const NFPROTO_IPV4: u32 = 2;
const REJECT_ICMP: u32 = 0;
const REJECT_TCP_RST: u32 = 1;
/// ICMP_PKT_FILTERED: administratively prohibited.
const PROHIBITED: u8 = 13;
const ACCEPT: i32 = 1;
const DROP: i32 = 0;
const JUMP: i32 = -3;
const GOTO: i32 = -4;
const SYN: u8 = 2;
const ACK: u8 = 16;

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;

/// Connection tracking states, as bits of `ct state`.
pub const ESTABLISHED: u32 = 2;
pub const RELATED: u32 = 4;
pub const NEW: u32 = 8;

/// Which interfaces.
#[derive(Clone, Copy, Debug)]
pub enum Interface<'a> {
    Named(&'a str),
    /// Those whose name begins so.
    Beginning(&'a str),
}

impl Interface<'_> {
    /// The compared bytes; the kernel compares this number of bytes.
    fn bytes(self) -> Vec<u8> {
        match self {
            Interface::Named(name) => {
                let mut bytes = name.as_bytes().to_vec();
                bytes.resize(libc::IFNAMSIZ, 0);
                bytes
            }
            Interface::Beginning(name) => name.as_bytes().to_vec(),
        }
    }
}

/// A rule.
#[derive(Clone, Debug, Default)]
pub struct Rule {
    pub(super) expressions: Attributes,
}

impl Rule {
    pub fn new() -> Rule {
        Rule::default()
    }

    fn expression(mut self, name: &str, data: Attributes) -> Rule {
        let expression = Attributes::default().text(EXPR_NAME, name).nest(EXPR_DATA, data);
        self.expressions = self.expressions.nest(LIST_ELEM, expression);
        self
    }

    fn compare(self, operator: u32, value: &[u8]) -> Rule {
        let data = Attributes::default()
            .be32(1, REG)
            .be32(2, operator)
            .nest(3, Attributes::default().bytes(DATA_VALUE, value));
        self.expression("cmp", data)
    }

    fn mask(self, mask: &[u8]) -> Rule {
        let value = |bytes: &[u8]| Attributes::default().bytes(DATA_VALUE, bytes);
        let data = Attributes::default()
            .be32(1, REG)
            .be32(2, REG)
            .be32(3, mask.len() as u32)
            .nest(4, value(mask))
            .nest(5, value(&vec![0; mask.len()]));
        self.expression("bitwise", data)
    }

    fn meta(self, key: u32, register: u32) -> Rule {
        let data = Attributes::default().be32(1, register).be32(2, key);
        self.expression("meta", data)
    }

    fn payload(self, base: u32, offset: u32, length: u32, register: u32) -> Rule {
        let data = Attributes::default()
            .be32(1, register)
            .be32(2, base)
            .be32(3, offset)
            .be32(4, length);
        self.expression("payload", data)
    }

    fn tracked(self, key: u32) -> Rule {
        let data = Attributes::default().be32(1, REG).be32(2, key);
        self.expression("ct", data)
    }

    fn immediate(self, register: u32, data: Attributes) -> Rule {
        let data = Attributes::default().be32(1, register).nest(2, data);
        self.expression("immediate", data)
    }

    fn verdict(self, code: i32, chain: Option<&str>) -> Rule {
        let mut verdict = Attributes::default().bytes(VERDICT_CODE, &code.to_be_bytes());
        if let Some(chain) = chain {
            verdict = verdict.text(VERDICT_CHAIN, chain);
        }
        self.immediate(REG_VERDICT, Attributes::default().nest(DATA_VERDICT, verdict))
    }

    /// `iifname`.
    pub fn arriving(self, at: Interface<'_>) -> Rule {
        self.meta(META_IIFNAME, REG).compare(CMP_EQ, &at.bytes())
    }

    /// `oifname`.
    pub fn leaving(self, by: Interface<'_>) -> Rule {
        self.meta(META_OIFNAME, REG).compare(CMP_EQ, &by.bytes())
    }

    /// `oifname !=`.
    pub fn leaving_elsewhere(self, than: Interface<'_>) -> Rule {
        self.meta(META_OIFNAME, REG).compare(CMP_NEQ, &than.bytes())
    }

    fn address(self, offset: u32, operator: u32, prefix: Prefix) -> Rule {
        let rule = self.payload(NETWORK_HEADER, offset, 4, REG);
        let rule = match prefix.length() {
            32 => rule,
            _ => rule.mask(&prefix.mask().octets()),
        };
        rule.compare(operator, &prefix.first().octets())
    }

    /// `ip saddr`.
    pub fn from(self, prefix: Prefix) -> Rule {
        self.address(SOURCE_ADDRESS, CMP_EQ, prefix)
    }

    /// `ip saddr !=`.
    pub fn not_from(self, prefix: Prefix) -> Rule {
        self.address(SOURCE_ADDRESS, CMP_NEQ, prefix)
    }

    /// `ip daddr`.
    pub fn to(self, prefix: Prefix) -> Rule {
        match prefix.length() {
            0 => self,
            _ => self.address(DESTINATION_ADDRESS, CMP_EQ, prefix),
        }
    }

    /// `ip daddr @set`.
    pub fn to_any_of(self, set: &str) -> Rule {
        let lookup = Attributes::default().text(1, set).be32(2, REG);
        self.payload(NETWORK_HEADER, DESTINATION_ADDRESS, 4, REG)
            .expression("lookup", lookup)
    }

    /// `meta l4proto`.
    pub fn protocol(self, protocol: u8) -> Rule {
        self.meta(META_L4PROTO, REG).compare(CMP_EQ, &[protocol])
    }

    /// `th dport`.
    pub fn port(self, ports: &RangeInclusive<u16>) -> Rule {
        let rule = self.payload(TRANSPORT_HEADER, DESTINATION_PORT, 2, REG);
        match ports.start() == ports.end() {
            true => rule.compare(CMP_EQ, &ports.start().to_be_bytes()),
            false => rule
                .compare(CMP_GTE, &ports.start().to_be_bytes())
                .compare(CMP_LTE, &ports.end().to_be_bytes()),
        }
    }

    /// `tcp flags & (syn | ack) != syn`, of a packet known to be TCP.
    pub fn begins_nothing(self) -> Rule {
        self.payload(TRANSPORT_HEADER, TCP_FLAGS, 1, REG)
            .mask(&[SYN | ACK])
            .compare(CMP_NEQ, &[SYN])
    }

    /// `ct state`: any of these bits.
    pub fn state(self, states: u32) -> Rule {
        self.tracked(CT_STATE)
            .mask(&states.to_ne_bytes())
            .compare(CMP_NEQ, &[0; 4])
    }

    /// `ct direction reply`.
    pub fn replying(self) -> Rule {
        self.tracked(CT_DIRECTION).compare(CMP_EQ, &[1])
    }

    /// `ct status dnat`.
    pub fn redirected(self) -> Rule {
        self.tracked(CT_STATUS)
            .mask(&IPS_DST_NAT.to_ne_bytes())
            .compare(CMP_NEQ, &[0; 4])
    }

    /// `fib daddr type local`.
    pub fn for_this_host(self) -> Rule {
        let data = Attributes::default()
            .be32(1, REG)
            .be32(2, FIB_ADDRTYPE)
            .be32(3, FIB_DADDR);
        self.expression("fib", data)
            .compare(CMP_EQ, &RTN_LOCAL.to_ne_bytes())
    }

    pub fn accept(self) -> Rule {
        self.verdict(ACCEPT, None)
    }

    pub fn drop(self) -> Rule {
        self.verdict(DROP, None)
    }

    pub fn jump(self, chain: &str) -> Rule {
        self.verdict(JUMP, Some(chain))
    }

    pub fn goto(self, chain: &str) -> Rule {
        self.verdict(GOTO, Some(chain))
    }

    /// `reject with tcp reset`, of a packet known to be TCP.
    pub fn reset(self) -> Rule {
        let data = Attributes::default().be32(1, REJECT_TCP_RST);
        self.expression("reject", data)
    }

    /// `reject with icmp admin-prohibited`.
    pub fn prohibit(self) -> Rule {
        let data = Attributes::default().be32(1, REJECT_ICMP).bytes(2, &[PROHIBITED]);
        self.expression("reject", data)
    }

    /// `masquerade`.
    pub fn masquerade(self) -> Rule {
        self.expression("masq", Attributes::default())
    }

    fn translate(self, kind: u32, to: Ipv4Addr) -> Rule {
        let value = Attributes::default().bytes(DATA_VALUE, &to.octets());
        let nat = Attributes::default()
            .be32(1, kind)
            .be32(2, NFPROTO_IPV4)
            .be32(3, REG);
        self.immediate(REG, value).expression("nat", nat)
    }

    /// `snat to`.
    pub fn snat(self, to: Ipv4Addr) -> Rule {
        self.translate(NAT_SNAT, to)
    }

    /// `dnat to`.
    pub fn dnat(self, to: Ipv4Addr) -> Rule {
        self.translate(NAT_DNAT, to)
    }

    /// `dnat to`, and a port, of a packet known to have one.
    pub fn dnat_to_port(self, to: Ipv4Addr, port: u16) -> Rule {
        let value = |bytes: &[u8]| Attributes::default().bytes(DATA_VALUE, bytes);
        let nat = Attributes::default()
            .be32(1, NAT_DNAT)
            .be32(2, NFPROTO_IPV4)
            .be32(3, REG)
            .be32(5, REG + 1);
        self.immediate(REG, value(&to.octets()))
            .immediate(REG + 1, value(&port.to_be_bytes()))
            .expression("nat", nat)
    }

    /// `dnat ip to meta l4proto . th dport map @map`; `by_address` adds `ip daddr .` to the key.
    pub fn dnat_by(self, map: &str, by_address: bool) -> Rule {
        let (rule, next) = match by_address {
            true => (self.payload(NETWORK_HEADER, DESTINATION_ADDRESS, 4, REG), REG + 1),
            false => (self, REG),
        };
        let lookup = Attributes::default().text(1, map).be32(2, REG).be32(3, REG);
        let nat = Attributes::default()
            .be32(1, NAT_DNAT)
            .be32(2, NFPROTO_IPV4)
            .be32(3, REG)
            .be32(5, REG + 1);
        rule.meta(META_L4PROTO, next)
            .payload(TRANSPORT_HEADER, DESTINATION_PORT, 2, next + 1)
            .expression("lookup", lookup)
            .expression("nat", nat)
    }
}
