/* CANN has tensors and executors in this file; here they are in acl/acl.h. */
#include "acl/acl.h"
