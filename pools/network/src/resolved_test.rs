use super::*;

#[test]
fn most_addresses_are_kept_and_the_oldest_make_room() {
    let now = Instant::now();
    let mut resolved = Resolved::default();
    let address = |n: usize| Ipv4Addr::from(0xcb00_0000 + n as u32);
    for n in 0..MAX_RESOLVED - 1 {
        let known = Known {
            name: "a.org".into(),
            until: now + Duration::from_secs(60 + n as u64),
        };
        resolved.known.insert(address(n), known);
    }
    resolved.found.insert(address(5000));
    let evicted = |new: &[usize]| resolved.evicted(&new.iter().map(|n| address(*n)).collect());
    assert!(evicted(&[0, 1, 5000]).is_empty(), "they are there already");
    assert_eq!(evicted(&[9000]), [address(5000)]);
    assert_eq!(evicted(&[9000, 9001, 0]), [address(5000), address(1)]);
}

#[test]
fn addresses_of_names_still_allowed_are_kept() {
    let mut resolved = Resolved::default();
    let now = Instant::now();
    for (address, name, seconds) in [
        ("203.0.113.1", "a.org", 60),
        ("203.0.113.2", "b.org", 60),
        ("203.0.113.3", "a.org", 0),
    ] {
        let known = Known {
            name: name.into(),
            until: now + Duration::from_secs(seconds),
        };
        resolved.known.insert(address.parse().unwrap(), known);
    }
    let kept = resolved.of_names(|name| name == "a.org");
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0].0, Ipv4Addr::new(203, 0, 113, 1));
    resolved.replace(Some("other".into()), &kept);
    assert_eq!(resolved.known.len(), 1);
}
