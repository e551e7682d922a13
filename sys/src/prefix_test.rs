use super::*;
use proptest::prelude::*;

#[test]
fn invalid_prefix_error_says_why() {
    for (text, why) in [
        ("", "no IPv4"),
        ("10.0.0.0/33", "no IPv4"),
        ("10.0.0.0/", "no IPv4"),
        ("10.0.0.0/+8", "no IPv4"),
        ("10.0.0/8", "no IPv4"),
        ("10.0.0.1/8", "10.0.0.0/8 is the network"),
        ("fd00::/8", "IPv6"),
    ] {
        let error = text.parse::<Prefix>().unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
    assert_eq!("0.0.0.0/0".parse(), Ok(Prefix::ALL));
    assert_eq!("192.0.2.7".parse(), Ok(Prefix::host(Ipv4Addr::new(192, 0, 2, 7))));
}

proptest! {
    #[test]
    fn prefix_round_trips_through_text(bits: u32, length in 0u8..=32) {
        let prefix = Prefix::around(bits.into(), length).unwrap();
        prop_assert_eq!(prefix.to_string().parse(), Ok(prefix));
        prop_assert!(prefix.contains(bits.into()));
    }

    #[test]
    fn prefixes_overlap_if_one_contains_the_other(a: u32, b: u32, x in 0u8..=32, y in 0u8..=32) {
        let (p, q) = (Prefix::around(a.into(), x).unwrap(), Prefix::around(b.into(), y).unwrap());
        let shorter = x.min(y);
        let same = Prefix::around(a.into(), shorter) == Prefix::around(b.into(), shorter);
        prop_assert_eq!(p.overlaps(q), same);
        prop_assert_eq!(q.overlaps(p), same);
    }
}
