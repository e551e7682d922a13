//! Signals by name or number, as docker's commands and images write them.

pub const KILL: u8 = libc::SIGKILL as u8;
pub const TERMINATE: u8 = libc::SIGTERM as u8;

/// The signals from 1, by name.
const NAMES: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];
/// SIGRTMIN of Linux's C libraries, and SIGRTMAX.
const REAL_TIME: (u8, u8) = (34, 64);

/// Parses a signal's name or number.
///
/// # Errors
/// What is expected, in words.
pub fn parse_signal(text: &str) -> Result<u8, String> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let (least, most) = REAL_TIME;
    let numbered = |offset: Option<&str>| offset?.parse::<u8>().ok();
    let number = match name {
        "RTMIN" => Some(least),
        "RTMAX" => Some(most),
        "IOT" => Some(libc::SIGABRT as u8),
        "POLL" => Some(libc::SIGIO as u8),
        _ => numbered(name.strip_prefix("RTMIN+"))
            .and_then(|n| least.checked_add(n))
            .or_else(|| {
                numbered(name.strip_prefix("RTMAX-"))
                    .and_then(|n| most.checked_sub(n))
                    .filter(|n| *n >= least)
            })
            .or_else(|| NAMES.iter().position(|known| *known == name).map(|n| n as u8 + 1))
            .or_else(|| name.parse().ok()),
    };
    let known = number.filter(|n| (1..=most).contains(n));
    known.ok_or_else(|| "a signal such as TERM, SIGHUP, RTMIN+3 or 15".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_names_or_numbers() {
        for (text, number) in [
            ("TERM", 15),
            ("SIGKILL", 9),
            ("sighup", 1),
            ("usr1", 10),
            ("SYS", 31),
            ("9", 9),
            ("64", 64),
            ("SIGRTMIN+3", 37),
            ("RTMAX-1", 63),
            ("RTMIN", 34),
        ] {
            assert_eq!(parse_signal(text), Ok(number), "{text}");
        }
        for wrong in [
            "", "0", "65", "SIG", "NOPE", "-1", "RTMIN+31", "RTMAX-64", "RTMIN+x",
        ] {
            assert!(parse_signal(wrong).is_err(), "{wrong}");
        }
    }
}
