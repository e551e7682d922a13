use super::*;

#[test]
fn redirect_without_our_cookie_is_not_ours() {
    let filter = |kind: &str, cookie: &[u8]| {
        let action = Attributes::default()
            .text(ACT_KIND, "mirred")
            .bytes(ACT_COOKIE, cookie);
        let options = Attributes::default()
            .bytes(U32_SELECTOR, &EVERYTHING)
            .nest(U32_ACTION, Attributes::default().nest(FIRST_ACTION, action));
        Attributes::default()
            .text(TCA_KIND, kind)
            .nest(TCA_OPTIONS, options)
    };
    let is_own = |filter: Attributes| is_own_filter(Parsed(filter.as_bytes()));
    assert_eq!(is_own(filter("u32", COOKIE)), Some(true));
    assert_eq!(is_own(filter("u32", b"somebody")), Some(false));
    assert_eq!(is_own(filter("bpf", COOKIE)), Some(false));
    assert_eq!(is_own(Attributes::default().text(TCA_KIND, "u32")), None);
}

proptest::proptest! {
    #[test]
    fn reading_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..128)) {
        is_own_filter(Parsed(&bytes));
    }
}
